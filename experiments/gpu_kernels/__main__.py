"""Tests and times the CUDA kernels on a GPU, in runs of at most ten minutes.

``python -m experiments.gpu_kernels --run 1 --out FOLDER``, and 2 to 5 with the same folder; each
ends with a hundred lines that say what was found:

1. the machine, one launch, and the tests of kernels and devices; it stops if one launch is wrong.
2. the speed of every op over that of a copy, and one rank's exchange of a bucket.
3. two ranks on one GPU: whether they connect by NCCL, then each test of their own.
4. compute-sanitizer over random calls, and Nsight Compute on kernels that may be slow.
5. steps of GPT-2 blocks with hooks over torch's hooks, and a compiled model beside a watched step.

A run consists of parts, which ``--part`` runs by name; two more run only so:

- ``compiled``: definitions by torch.compile; takes long.
- ``cubins``: compiles all kernels into ``COMMHOOKS_CACHE``, without a GPU.

Each part writes a table, row by row. A case that fails has a row that says so. The same command
with the same ``--out`` resumes where it stopped, also after a crash; to try a case again, delete
its row, or the table. ``--rehearse`` writes to ``rehearsal`` in that folder. Nothing needs a
network.
Kernels and the library for CPUs can be brought along to a machine without compilers: ``make
cubins``, with the NVRTC of that machine, and ``kernels/libcommhooks_kernels.so``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.progress import Progress

from commhooks.kernels.runtime import cuda, nvrtc
from experiments.gpu_kernels import copy_ratio, cubins, exchange, programs, training, versions
from experiments.gpu_kernels.dry_run import rehearsed
from experiments.gpu_kernels.summary import pack_logs, summary
from experiments.gpu_kernels.table import LostDeviceError, Setting, Step, Table, run_steps

_RESTARTS = "COMMHOOKS_GPU_KERNELS_RESTARTS"
_ENDS = "COMMHOOKS_GPU_KERNELS_ENDS"  # ``time.monotonic()``, which all processes share
_GRACE = 20.0  # seconds


class Part(NamedTuple):
    """Describes a table: its columns, its steps, and how many of them run at a time.

    A part that needs no GPU compiles, and always begins anew: what is compiled is found again.
    """

    columns: tuple[str, ...]
    steps: Callable[[Setting], Iterator[Step]]
    workers: int = 1
    needs_gpu: bool = True


PARTS = {
    "versions": Part(versions.COLUMNS, versions.steps),
    "check": Part(programs.COLUMNS, programs.check_steps, workers=6),
    "share": Part(copy_ratio.COLUMNS, copy_ratio.steps),
    "exchange": Part(exchange.COLUMNS, exchange.steps),
    "connect": Part(programs.COLUMNS, programs.connect_steps),
    "nccl": Part(programs.COLUMNS, programs.nccl_steps, workers=2),
    "sanitize": Part(programs.COLUMNS, programs.sanitize_steps, workers=6),
    "profile": Part(programs.COLUMNS, programs.profile_steps),
    "training": Part(training.COLUMNS, training.steps),
    "compiled": Part(copy_ratio.COMPILED_COLUMNS, copy_ratio.compiled_steps),
    "cubins": Part(cubins.COLUMNS, cubins.steps, workers=2, needs_gpu=False),
}


class Run(NamedTuple):
    """Describes a run: the minutes in which each of its parts begins cases, and when it ends."""

    parts: dict[str, float]
    minutes: float
    repeats: int = 9


RUNS = {
    1: Run({"versions": 1.0, "check": 4.0}, 8.0),
    2: Run({"share": 5.0, "exchange": 3.0}, 9.0),
    3: Run({"connect": 2.0, "nccl": 5.5}, 9.0),
    4: Run({"sanitize": 5.5, "profile": 2.0}, 9.0),
    5: Run({"training": 8.0}, 9.0),
}


def _in_words(number: int) -> str:
    return f"{number}: {' and '.join(RUNS[number].parts)}"


def main(
    run: Annotated[int, typer.Option(help="; ".join(map(_in_words, RUNS)))] = 0,
    part: Annotated[
        list[str] | None, typer.Option(help=f"One or more of {', '.join(PARTS)}.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="With --part: begins no case later.")] = 8.0,
    repeats: Annotated[int, typer.Option(help="With --part: timed turns.", min=3)] = 15,
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    architecture: Annotated[str, typer.Option(help="Of cubins, such as 90.")] = "90",
    rehearse: Annotated[bool, typer.Option(help="Small buckets on the CPU; no launch.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of tables and logs.")] = Path(
        "results/gpu_kernels"
    ),
) -> None:
    """Runs a run, or parts of it, and prints what was found."""
    if bool(run) == bool(part) or (run and run not in RUNS) or set(part or ()) - set(PARTS):
        raise typer.BadParameter(
            f"give --run 1 to {len(RUNS)}, or --part with one of {', '.join(PARTS)}"
        )
    plan = RUNS[run] if run else Run(dict.fromkeys(part or (), minutes), minutes + 1, repeats)
    # A new process after a lost device ends when the first one had to.
    ends = float(os.environ.get(_ENDS, time.monotonic() + 60 * plan.minutes))
    given: dict[str, Any] = {"only": only, "ends": ends, "architecture": architecture}
    if rehearse:
        with rehearsed() as small:
            # Not beside rows that a GPU has written, or will write.
            _run_all(plan, replace(small(out / "rehearsal"), **given))
        return
    if reason := _missing(plan):
        typer.echo(f"experiments.gpu_kernels: {reason}")
        sys.exit(1)
    # A case that hangs: its stack, and an end, so that the next call continues with the next case.
    # Later than programs are ended, whose rows and summary are still to be written.
    faulthandler.dump_traceback_later(max(ends + _GRACE - time.monotonic(), 1), exit=True)
    try:
        _run_all(plan, Setting(out, repeats=plan.repeats, **given))
    except LostDeviceError as lost:
        _restart(str(lost), ends)
    faulthandler.cancel_dump_traceback_later()


def _missing(plan: Run) -> str | None:
    """Returns why a run cannot begin; None if it can."""
    if any(PARTS[name].needs_gpu for name in plan.parts):
        if not torch.cuda.is_available():
            return "torch sees no CUDA device; --rehearse needs none"
        return cuda.missing()
    try:
        nvrtc.load_nvrtc()
    except OSError as error:
        return f"{error}; make cubins installs it"
    return None


def _run_all(plan: Run, setting: Setting) -> None:
    for name, minutes in plan.parts.items():
        _run_part(name, setting, min(time.monotonic() + 60 * minutes, setting.ends))
        if name == "versions" and _is_first_launch_wrong(setting):
            typer.echo(
                "the first launch failed: nothing else is tried. Delete versions.csv to try again"
            )
            break
    lines = summary(setting.out, list(plan.parts))
    pack_logs(setting.out)
    typer.echo("\n".join([*lines, f"tables and logs are in {setting.out}"]))


def _run_part(name: str, setting: Setting, until: float) -> None:
    part = PARTS[name]
    path = setting.out / f"{name}.csv"
    if setting.device == "cpu" or not part.needs_gpu:  # the code may have changed since
        path.unlink(missing_ok=True)
    table = Table(path, part.columns)
    listed = [step for step in part.steps(setting) if setting.only in step.name]
    if not listed:
        typer.echo(f"{name}: no case has {setting.only!r} in its name")
    with Progress() as progress:
        bar = progress.add_task(name, total=len(listed))

        def report(text: str) -> None:
            progress.advance(bar)
            progress.console.print(text, markup=False, highlight=False)

        left_out = run_steps(table, listed, until=until, workers=part.workers, report=report)
    if left_out:
        typer.echo(f"{name}: {len(left_out)} cases are left: run the command again")


def _is_first_launch_wrong(setting: Setting) -> bool:
    rows = Table(setting.out / "versions.csv", versions.COLUMNS).rows()
    launches = [row for row in rows if row["case"] == "one launch"]
    return setting.device != "cpu" and any(
        row["error"] or not row["value"].startswith("right") for row in launches
    )


def _restart(why: str, ends: float) -> None:
    """Continues in a new process, for the time that is left: this one can launch nothing."""
    restarts = int(os.environ.get(_RESTARTS, "0"))
    typer.echo(why)
    if time.monotonic() >= ends or restarts >= 20:
        sys.exit(1)
    os.environ |= {_RESTARTS: str(restarts + 1), _ENDS: str(ends)}
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "experiments.gpu_kernels", *sys.argv[1:]])


if __name__ == "__main__":
    typer.run(main)
