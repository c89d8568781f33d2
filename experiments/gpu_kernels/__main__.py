"""Tests and times the CUDA kernels on a GPU, in parts of at most eight minutes.

``python -m experiments.gpu_kernels`` runs the parts one after the other; ``--part`` names some:

- ``versions``: the machine, one launch, and what launches cost the host.
- ``check``: the tests of kernels and devices, on the GPU alone.
- ``share``: the speed of every op, over that of a copy.
- ``exchange``: one rank's exchange of a bucket: launches, host time, GPU time.
- ``nccl``: two ranks on one GPU.
- ``sanitize``: compute-sanitizer over random calls.
- ``compiled``: definitions by torch.compile; takes long, and runs only if it is named.
- ``cubins``: compiles all kernels into ``COMMHOOKS_CACHE``, without a GPU; only if it is named.

Each writes a table, row by row. A case that fails has a row that says so. The same command with the
same ``--out`` resumes where it stopped, also after a crash. Kernels and the library for CPUs can be
brought along to a machine without compilers or network: ``--part cubins --architecture 90`` with
the machine's version of NVRTC, and ``kernels/libcommhooks_kernels.so``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.progress import Progress

from commhooks.kernels.runtime import cuda
from experiments.gpu_kernels import copy_ratio, cubins, exchange, programs, versions
from experiments.gpu_kernels.dry_run import rehearsed
from experiments.gpu_kernels.table import LostDeviceError, Setting, Step, Table, run_steps

_RESTARTS = "COMMHOOKS_GPU_KERNELS_RESTARTS"


class Part(NamedTuple):
    """Describes a table: its columns, its steps, how many run at a time, and whether unasked."""

    columns: tuple[str, ...]
    steps: Callable[[Setting], Iterator[Step]]
    workers: int = 1
    unasked: bool = True
    needs_gpu: bool = True


PARTS = {
    "versions": Part(versions.COLUMNS, versions.steps),
    "check": Part(programs.COLUMNS, programs.check_steps, workers=6),
    "share": Part(copy_ratio.COLUMNS, copy_ratio.steps),
    "exchange": Part(exchange.COLUMNS, exchange.steps),
    "nccl": Part(programs.COLUMNS, programs.nccl_steps),
    "sanitize": Part(programs.COLUMNS, programs.sanitize_steps, workers=6),
    "compiled": Part(copy_ratio.COMPILED_COLUMNS, copy_ratio.compiled_steps, unasked=False),
    "cubins": Part(cubins.COLUMNS, lambda _: cubins.steps("90"), 2, False, needs_gpu=False),
}


def main(
    part: Annotated[list[str] | None, typer.Option(help="One or more of the parts.")] = None,
    minutes: Annotated[float, typer.Option(help="Begins no case later than this.")] = 8.0,
    repeats: Annotated[int, typer.Option(help="Timed turns per op.", min=3)] = 15,
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    architecture: Annotated[str, typer.Option(help="Of cubins, such as 90.")] = "90",
    rehearse: Annotated[bool, typer.Option(help="Small buckets on the CPU; no launch.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of tables and logs.")] = Path(
        "results/gpu_kernels"
    ),
) -> None:
    """Runs parts of the study, and prints what is left of them."""
    wanted = part or [name for name, study in PARTS.items() if study.unasked]
    if unknown := set(wanted) - set(PARTS):
        raise typer.BadParameter(f"--part is one of {', '.join(PARTS)}, got {sorted(unknown)}")
    begin = time.monotonic()
    until = begin + 60 * minutes
    if rehearse:
        with rehearsed() as small:
            _run_all(wanted, small(out), until, architecture)
        return
    reason = cuda.missing() if torch.cuda.is_available() else "torch sees no CUDA device"
    if reason and any(PARTS[name].needs_gpu for name in wanted):
        # ``versions`` reports the reason, so that does not end the run.
        typer.echo(f"experiments.gpu_kernels: {reason}")
        if not torch.cuda.is_available():
            sys.exit(1)
    # A case that hangs: its stack, and an end, so that the next call continues with the next case.
    faulthandler.dump_traceback_later(60 * minutes + 60, exit=True)
    try:
        _run_all(wanted, Setting(out, repeats=repeats, only=only), until, architecture)
    except LostDeviceError as lost:
        _again(str(lost), until)
    faulthandler.cancel_dump_traceback_later()


def _run_all(wanted: list[str], setting: Setting, until: float, architecture: str) -> None:
    for name in wanted:
        study = PARTS[name]
        table = Table(setting.out / f"{name}.csv", study.columns)
        steps = cubins.steps(architecture) if name == "cubins" else study.steps(setting)
        listed = [step for step in steps if setting.only in step.name]
        with Progress() as progress:
            bar = progress.add_task(name, total=len(listed))

            def report(text: str, progress: Progress = progress, bar: int = bar) -> None:  # type: ignore[assignment]
                progress.advance(bar)  # type: ignore[arg-type]
                progress.console.print(text, markup=False, highlight=False)

            outcome = run_steps(table, listed, until=until, workers=study.workers, report=report)
        left = f"; {len(outcome.left)} are left: run the command again" if outcome.left else ""
        failed = f", {outcome.failed} of them failed" if outcome.failed else ""
        typer.echo(f"{name}: {outcome.done} cases{failed}{left} ({setting.out / name}.csv)")


def _again(why: str, until: float) -> None:
    """Continues in a new process, for the minutes left, since this one can launch nothing."""
    minutes = (until - time.monotonic()) / 60
    restarts = int(os.environ.get(_RESTARTS, "0"))
    typer.echo(why)
    if minutes <= 0 or restarts >= 20:
        sys.exit(1)
    os.environ[_RESTARTS] = str(restarts + 1)
    # Of two equal options the last one counts.
    arguments = [*sys.argv[1:], "--minutes", f"{minutes:.2f}"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "experiments.gpu_kernels", *arguments])


if __name__ == "__main__":
    typer.run(main)
