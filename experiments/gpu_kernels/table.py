"""Runs the steps of a part and writes a row for each, so that no minute on a GPU is lost."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["LostDeviceError", "Setting", "Step", "Table", "run_steps"]

Row = dict[str, Any]
COMMON = ("case", "error", "seconds")


class LostDeviceError(RuntimeError):
    """Raised after an error that persists: this process can launch nothing any more."""


@dataclass(frozen=True)
class Setting:
    """Holds the options of the command line.

    Attributes:
        out: folder of tables and logs.
        device: where buckets are; "cpu" in a rehearsal.
        repeats: timed turns.
        large, small: entries of a bucket.
        only: text that the names of cases contain.
        ends: ``time.monotonic()`` at which programs are ended.
        architecture: of cubins, such as "90".
    """

    out: Path
    device: str = "cuda"
    repeats: int = 15
    large: int = 256 * 2**20 // 4
    small: int = 25 * 2**20 // 4
    only: str = ""
    ends: float = math.inf
    architecture: str = "90"


@dataclass(frozen=True)
class Step:
    """Describes one row: its name, and the function that computes the other columns."""

    name: str
    run: Callable[[], Row]


class Table:
    """Keeps rows in a CSV file, which a later run with the same file continues.

    A case that has begun and has no row ended its process (a crash, a hang, a lost device); the
    next run gives it a row that says so, and does not begin it again.

    Args:
        path: the file.
        columns: columns besides case, error and seconds.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path, self._begun = path, path.with_suffix(".begun")
        self._columns = [COMMON[0], *columns, *COMMON[1:]]
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done: set[str] = set()
        if path.exists():
            self.done = {row["case"] for row in self.rows()}
        else:
            self._append(self._columns)
        if self._begun.exists():
            for name in self._begun.read_text().splitlines():
                if name not in self.done:
                    self.add({"case": name, "error": "its process ended, or was ended, in it"})
            self._begun.unlink()

    def rows(self) -> list[dict[str, str]]:
        """Returns the rows in the file."""
        with self._path.open(newline="") as file:
            return list(csv.DictReader(file))

    def begin(self, name: str) -> None:
        """Records that a case runs now."""
        self._begun.write_text(name + "\n")

    def add(self, row: Row) -> None:
        """Writes a row at once; raises KeyError for a column that the table does not have."""
        if unknown := row.keys() - set(self._columns):
            raise KeyError(f"{self._path.name} has no column {sorted(unknown)}")
        self._append([_shown(row.get(column, "")) for column in self._columns])
        self.done.add(row["case"])

    def end(self) -> None:
        """Records that no case runs."""
        self._begun.unlink(missing_ok=True)

    def _append(self, values: Sequence[Any]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(values)


def _shown(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def run_steps(
    table: Table,
    steps: Iterable[Step],
    *,
    until: float,
    workers: int = 1,
    report: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Runs the steps that have no row yet; returns the names of those that ``until`` left out.

    Args:
        until: ``time.monotonic()`` at which no step is begun any more.
        workers: steps at a time; more than one for steps that start processes of their own.
        report: called with each row.

    Raises:
        LostDeviceError: the device answers with an error; the step has its row.
    """
    left_out = []
    left = [step for step in steps if step.name not in table.done]

    def run(step: Step) -> tuple[Step, Row | None]:
        if time.monotonic() >= until:
            return step, None
        if workers == 1:
            table.begin(step.name)
        return step, _row(step)

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        # One at a time in this thread: device and stream are those of a thread.
        results = (
            map(run, left)
            if workers == 1
            else (future.result() for future in as_completed([pool.submit(run, s) for s in left]))
        )
        for step, row in results:
            if row is None:
                left_out.append(step.name)
                continue
            table.add(row)
            report(f"{step.name}: {row['error'] or 'done'} ({row['seconds']:.1f} s)")
            if row["error"] and workers == 1:
                _check_device(step.name)
    table.end()
    return left_out


def _row(step: Step) -> Row:
    begin = time.perf_counter()
    row: Row = {"error": ""}
    try:
        row |= step.run()
    except Exception as error:  # a case that fails is a result; the next one has its turn
        text = str(error).strip().splitlines() or [""]
        row["error"] = f"{type(error).__name__}: {text[0]}"[:300]
    return row | {"case": step.name, "seconds": time.perf_counter() - begin}


def _check_device(name: str) -> None:
    """Raises if the device returns only errors after a case that failed."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise LostDeviceError(f"the device is lost since {name!r}: {error}") from error
