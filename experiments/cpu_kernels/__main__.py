"""Compares the time of every CPU kernel with that of a copy of the bucket.

Run ``python -m experiments.cpu_kernels``: a bucket of 25 MiB of float32, one thread. A turn times a
copy (memcpy) and then each way to run an op: the kernel, the definition in eager PyTorch and, with
``--compiled``, by torch.compile; and the same op of other packages that are installed. ``ratio`` is
the time of an op over that of the copy in the same turn: the median of the turns with its
quartiles. ``roofline`` is the share of the copy's speed that an op reaches, counting the bytes that
it has to move; ``kernel is faster by`` is the time of a way over that of the kernel. ``--all-sets``
runs the instruction sets below the best of this processor, too.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import pandas as pd
import torch
import typer
from rich.progress import Progress

from commhooks.kernels.runtime import cpu
from experiments.tools.kernel_cases import COPIED, Case, cases

ENTRIES = 25 * 2**20 // 4
BLOCK = 1024


def _turns(listed: list[Case], turns: int, compiled: bool, progress: Progress) -> pd.DataFrame:
    x = torch.randn(ENTRIES)
    other = torch.empty_like(x)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    rows = []
    bar = progress.add_task("measuring", total=len(listed))
    for case in listed:
        progress.update(bar, description=case.name)
        ways = {"kernel": case.run, "definition": case.define}
        if compiled:
            torch.compiler.reset()  # or the number of recompilations is exceeded
            ways["compiled"] = torch.compile(case.define)
        ways |= case.rivals
        for call in ways.values():
            call()  # compiles, and touches the memory
        for turn in range(turns):
            for way, call in ways.items():
                # All ways but the kernel are slow, and less exact numbers do for them.
                if way != "kernel" and turn >= max(5, turns // 3):
                    continue
                begin = time.perf_counter()
                memcpy(other.data_ptr(), x.data_ptr(), x.nbytes)
                middle = time.perf_counter()
                call()
                end = time.perf_counter()
                rows.append(
                    {
                        "op": case.name,
                        "way": way,
                        "ratio": (end - middle) / (middle - begin),
                        "bytes": case.bytes,
                    }
                )
        progress.advance(bar)
    return pd.DataFrame(rows)


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    groups = rows.groupby(["op", "way"], sort=False)
    table = groups.ratio.quantile([0.25, 0.5, 0.75]).unstack()
    table.columns = pd.Index(["q1", "ratio", "q3"])
    table["bytes"] = groups.bytes.first()
    table["roofline"] = table["bytes"] / COPIED / table.ratio
    kernel = table.ratio.xs("kernel", level="way")
    table["kernel is faster by"] = table.ratio / kernel.reindex(table.index, level="op")
    return table.reset_index()[
        ["op", "way", "ratio", "q1", "q3", "bytes", "roofline", "kernel is faster by"]
    ]


def _draw(table: pd.DataFrame, path: Path) -> None:
    mpl.use("agg")
    import matplotlib.pyplot as plt

    wide = table[table.way.isin(["kernel", "definition"])].pivot(
        index="op", columns="way", values="ratio"
    )
    wide = wide.reindex(table.op.unique()[::-1])[["definition", "kernel"]]
    figure, axes = plt.subplots(figsize=(8, 0.34 * len(wide) + 1.2), layout="constrained")
    wide.plot.barh(ax=axes, logx=True, color=["#b0b7c3", "#3b6ea5"], width=0.75)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time over that of a copy of the bucket (ratio, logarithmic)")
    axes.set_ylabel("")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(
    turns: Annotated[int, typer.Option(help="Turns per op.", min=5)] = 15,
    compiled: Annotated[bool, typer.Option(help="The definitions by torch.compile too.")] = False,
    all_sets: Annotated[bool, typer.Option(help="Every instruction set, in turn.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the table and the picture.")] = Path(
        "results/cpu_kernels"
    ),
) -> None:
    """Prints the ratios; 1 is a copy of the bucket."""
    if reason := cpu.missing():
        sys.exit(f"experiments.cpu_kernels: {reason}")
    best = cpu.instruction_set()
    if all_sets:
        # In processes of their own: a process loads the kernels of one instruction set.
        for name in cpu.INSTRUCTION_SETS[1 : cpu.INSTRUCTION_SETS.index(best)]:
            command = [sys.executable, "-m", "experiments.cpu_kernels", "--turns", str(turns)]
            subprocess.run(
                [*command, "--out", str(out)],
                env=os.environ | {"COMMHOOKS_CPU": name},
                check=True,
            )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(ENTRIES)
    with Progress() as progress:
        table = _summary(_turns(cases(x, BLOCK), turns, compiled, progress))
    typer.echo(f"instruction set {best}")
    typer.echo(table.to_string(index=False, float_format="{:.2f}".format))
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / f"{best}.csv", index=False)
    _draw(table, out / f"{best}.png")
    typer.echo(f"wrote {out / best}.csv and .png")


if __name__ == "__main__":
    typer.run(main)
