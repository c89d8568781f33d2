"""Says in a hundred lines what a run has found, and packs its logs into one file."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["LINES", "pack_logs", "summary"]

LINES = 100
_LOG_LINES = 6  # the last lines of the log of a program that failed
_WIDTH = 110
# Tables whose rows are all shown, with the columns that are shown.
_SHOWN = {
    "versions": ("value",),
    "exchange": ("own kernels", "operations of torch", "host microseconds", "GPU microseconds"),
    "training": ("milliseconds", "over none", "over torch's hook"),
}


def summary(out: Path, parts: Sequence[str]) -> list[str]:
    """Returns at most a hundred lines: failures first, then figures."""
    tables = {name: _rows(out / f"{name}.csv") for name in parts}
    lines = [_counts(name, rows) for name, rows in tables.items()]
    failed = [(name, row) for name, rows in tables.items() for row in rows if row["error"]]
    figures = [text for name, rows in tables.items() for text in _figures(name, rows)]
    room = LINES - len(lines) - min(len(figures), LINES // 2) - 1  # 1: "and more failures"
    for name, row in failed:
        about = [f"! {name}, {row['case']}: {row['error']}", *_log_of(out, row["error"])]
        if len(about) > room:
            about = about[: min(room, 1)]  # without its log
        if not about:
            lines.append(f"! and more failures: see {name}.csv")
            break
        lines += about
        room -= len(about)
    lines += figures
    return [line[:_WIDTH] for line in lines[:LINES]]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _counts(name: str, rows: Sequence[dict[str, str]]) -> str:
    failed = sum(bool(row["error"]) for row in rows)
    passed = sum(int(row.get("passed") or 0) for row in rows)
    skipped = sum(int(row.get("skipped") or 0) for row in rows)
    tests = f"; tests: {passed} passed, {skipped} skipped" if passed or skipped else ""
    return f"{name}: {len(rows)} cases, {failed} failed{tests}"


def _log_of(out: Path, error: str) -> list[str]:
    log = out / error.rpartition("see ")[2]
    if not log.is_file():
        return []
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR", "========="))]
    return [f"    {line}" for line in (marked or lines)[-_LOG_LINES:]]


def _figures(name: str, rows: Sequence[dict[str, str]]) -> Iterator[str]:
    right = [row for row in rows if not row["error"]]
    for row in right:
        if name in _SHOWN:
            values = (f"{key} {row[key]}" for key in _SHOWN[name] if row[key])
            yield f"{row['case']}: {', '.join(values)}"
    if name == "share" and right:
        yield "below the goal, from 256 MiB (share of a copy; predicted; goal):"
        slow = [
            r for r in right if r["bucket"] == "256 MiB" and float(r["share"]) < float(r["goal"])
        ]
        for row in sorted(slow, key=lambda row: float(row["share"]) / float(row["goal"])):
            yield f"  {row['op']}: {row['share']}; {row['predicted'] or '-'}; {row['goal']}"


def pack_logs(out: Path) -> None:
    """Moves the logs of a folder into ``logs.zip``, which keeps those of earlier runs."""
    logs = sorted(out.glob("log_*.txt"))
    if logs:
        with zipfile.ZipFile(out / "logs.zip", "a", zipfile.ZIP_DEFLATED) as archive:
            for log in logs:
                archive.write(log, log.name)
                log.unlink()
