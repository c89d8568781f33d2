"""Runs what is missing of a study on some processes, and appends a row per run to a file."""

from __future__ import annotations

import csv
import io
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from experiments.quality.run import trained
from experiments.quality.setups import Arm, Setup
from experiments.quality.verdicts import wanted

__all__ = ["Planned", "Progressed", "append", "commit", "missing", "planned", "read", "run_all"]

_REPORTED_S = 60.0  # between two lines of a log


class Planned(NamedTuple):
    """Names a run: an arm, and the number from which its seed comes."""

    arm: Arm
    number: int


def planned(setup: Setup, rows: pd.DataFrame, seeds: int | None = None) -> list[Planned]:
    """Returns the runs of a task, seed by seed over all arms: each beginning is balanced.

    Args:
        setup: the task.
        rows: of the runs that there are, which may have settled the verdict of an arm.
        seeds: runs of an arm at most; None: as many as the plan says.
    """
    needed = wanted(setup, rows)
    most = max(needed.values(), default=0)
    return [
        Planned(arm, number)
        for number in range(min(most, seeds or most))
        for arm in setup.arms
        if number < needed[arm.name]
    ]


# ---- the file


def read(path: Path) -> pd.DataFrame:
    """Returns the rows of a file; cuts off half a row at its end, left by a power cut.

    Raises:
        ValueError: a run is there twice.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    if not whole:
        return pd.DataFrame(columns=["task", "arm", "run", "steps", "loss", "misses", "seconds"])
    rows = pd.read_csv(io.BytesIO(whole), dtype={"commit": str})
    twice = rows[rows.duplicated(["arm", "run"])]
    if len(twice):
        runs = ", ".join(f"{row.run} of {row.arm}" for row in twice.head(3).itertuples())
        raise ValueError(
            f"{path} has runs twice ({runs}), as two studies leave that write to one file: "
            "delete one row of each"
        )
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Appends a row with a single write, so that a file has whole rows only.

    Raises:
        ValueError: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if not path.exists() or not path.stat().st_size:
        writer.writerow(row)
    else:
        with path.open() as file:
            columns = next(csv.reader(file))
        if columns != list(row):
            raise ValueError(f"{path} has the columns {columns}, the run has {list(row)}")
    writer.writerow(f"{v:.9g}" if isinstance(v, float) else v for v in row.values())
    with path.open("ab", buffering=0) as file:
        file.write(text.getvalue().encode())
        os.fsync(file.fileno())


def missing(runs: Sequence[Planned], rows: pd.DataFrame, steps: int) -> list[Planned]:
    """Returns the runs that a file does not have.

    Raises:
        ValueError: the file has runs of another number of steps.
    """
    other = set(rows.steps) - {steps}
    if other:
        raise ValueError(
            f"it has runs of {sorted(other)} steps, this plan has {steps}: a rehearsal?"
        )
    have = set(zip(rows.arm, rows.run, strict=True))
    return [run for run in runs if (run.arm.name, run.number) not in have]


def commit() -> str:
    """Returns the commit of this repository, with a plus if its source was changed since."""
    folder = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git(
            "status", "--porcelain", "--", "commhooks", "ddp_core", "kernels", "experiments"
        )
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):  # an archive without history
        return "unknown"


# ---- processes


def _begin(parent: int) -> None:
    """Prepares a process: one thread, deaf to Ctrl-C, and gone with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(setup: Setup, run: Planned, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    return trained(setup, run.arm, run.number, device=device)


def run_all(
    setup: Setup,
    runs: Sequence[Planned],
    *,
    jobs: int,
    device: str,
    until: float,
    longest: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """Yields the row of each run as it ends.

    Args:
        setup: the task.
        runs: in the order in which they start.
        jobs: processes.
        device: "cpu" or "cuda".
        until: time (``time.monotonic``) after which no run is to end; those that would do not
            start. Runs are taken to last as long as the longest so far.
        longest: seconds that a run is known to take.
    """
    # Kept, not given back: the system clears each page that a process gets, which takes a third of
    # a step of MiniLM. The C library reads these when a process starts.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(name, str(2**32))
    # Spawned: a fork of a process that has used torch's threads may hang in its first kernel.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (os.getpid(),))
    waiting = list(reversed(runs))
    under_way: set[Future[dict[str, Any]]] = set()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < jobs and time.monotonic() + longest < until:
                under_way.add(pool.submit(_run, setup, waiting.pop(), device))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                row = future.result()
                longest = max(longest, row["seconds"])
                yield row
    finally:
        for process in list((pool._processes or {}).values()):
            if under_way:
                process.kill()
        pool.shutdown(cancel_futures=True)


class Progressed:
    """Shows how many runs are done and how long the others take: a bar, or lines in a log.

    Args:
        setup: the task.
        total: runs, with those that were done before.
        rows: of the runs that were done before.
        jobs: processes.
        console: where it is shown.
    """

    def __init__(
        self, setup: Setup, total: int, rows: pd.DataFrame, left: Sequence[Planned], jobs: int,
        console: Console,
    ) -> None:  # fmt: skip
        self._left = [run.arm.name for run in left]
        self._seconds: dict[str, list[float]] = {}
        for arm, seconds in zip(rows.arm, rows.seconds, strict=True):
            self._seconds.setdefault(arm, []).append(seconds)
        self._name, self._total, self._jobs, self._console = setup.name, total, jobs, console
        self._printed_at = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self.bar.add_task(self._name, total=total, completed=total - len(left))

    def add(self, row: dict[str, Any]) -> None:
        """Counts a run that has ended."""
        self._left.remove(row["arm"])
        # What is latest counts: the machine may have become busier.
        self._seconds.setdefault(row["arm"], []).append(row["seconds"])
        text = f"{self._name}: {self.left()} left"
        self.bar.update(self._task, advance=1, description=text)
        now = time.monotonic()
        is_due = now - self._printed_at > _REPORTED_S or not self._left
        if not self._console.is_terminal and is_due:
            self._printed_at = now
            done = self._total - len(self._left)
            print(f"{text}, {done} of {self._total} runs, last {row['seconds']:.1f} s", flush=True)

    def left(self) -> str:
        """Returns the time that the other runs will take, as hours, minutes and seconds."""
        usual = fmean(fmean(values[-5:]) for values in self._seconds.values())
        each = {arm: fmean(values[-5:]) for arm, values in self._seconds.items()}
        seconds = sum(each.get(arm, usual) for arm in self._left) / self._jobs
        return str(timedelta(seconds=round(seconds)))
