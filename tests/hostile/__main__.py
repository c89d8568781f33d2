"""``python -m tests.hostile --cases 100000``: as many cases, in two processes, and a table."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from tests.hostile.runs import Cost, run_some


def main() -> int:
    """Runs them, prints what broke and what the worst cost."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    begun = time.monotonic()
    share = -(-options.cases // options.processes)
    last = options.first + options.cases
    begins = range(options.first, last, share)
    parts, failures = [], []
    with (
        tempfile.TemporaryDirectory(prefix="hostile-") as folder,
        ProcessPoolExecutor(options.processes, get_context("spawn")) as pool,
    ):
        notes = [f"{folder}/{first}" for first in begins]
        running = [
            pool.submit(run_some, first, min(first + share, last), note)
            for first, note in zip(begins, notes, strict=True)
        ]
        for process, note in zip(running, notes, strict=True):
            try:
                parts.append(process.result())
            except BrokenProcessPool:  # one of them died, and the others were ended for it
                failures.append(f"a process ended at seed {Path(note).read_text().strip()}")
    counts: Counter[str] = sum((part.counts for part in parts), Counter())
    failures += [failure for part in parts for failure in part.failures]
    print(
        f"{sum(counts.values())} cases in {time.monotonic() - begun:.0f} s, {len(failures)} broke"
    )
    print(f"{'kind':18s} {'cases':>7s} {'most MB':>8s} {'most s':>7s}")
    for kind, count in sorted(counts.items()):
        costs = [part.worst.get(kind, Cost(0, 0.0)) for part in parts]
        nbytes, seconds = max(cost.nbytes for cost in costs), max(cost.seconds for cost in costs)
        print(f"{kind:18s} {count:7d} {nbytes / 2**20:8.1f} {seconds:7.2f}")
    for failure in failures[:50]:
        print(failure)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
