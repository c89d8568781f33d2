"""Runs pairs of features: ``python -m tests.pairs``, all; ``--share 0.1``, some of them.

``--with NAME``: only pairs with that feature. Prints what is refused, with the reason, and what is
broken, with a line that runs it again.
"""

from __future__ import annotations

import argparse
import queue
import re
import sys
import threading
import time

from tests.fuzz.laws import Verdict
from tests.fuzz.runner import Runner
from tests.pairs.features import FEATURES, HOSTS, TOGETHER, case_of, expected, pairs

__all__ = ["Found", "run_pairs", "wrong"]

Found = dict[tuple[str, str, str], Verdict]  # by host and the two features


def run_pairs(
    wanted: list[tuple[str, str, str]], *, processes: int = 2, patience: float = 10.0
) -> Found:
    """The verdicts on these pairs, each host and two features."""
    todo: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
    for value in wanted:
        todo.put(value)
    verdicts: Found = {}
    begin, lock = time.monotonic(), threading.Lock()

    def work() -> None:
        runner = Runner(patience)
        try:
            while True:
                host, left, right = todo.get_nowait()
                case = case_of(host, left, right)
                assert case is not None
                verdict = runner.run(case)
                with lock:
                    verdicts[host, left, right] = verdict
                    if len(verdicts) % 100 == 0:
                        print(
                            f"{len(verdicts)} pairs, {time.monotonic() - begin:.0f} s", flush=True
                        )
        except queue.Empty:
            pass
        finally:
            runner.restart()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # what was found so far
        pass
    return verdicts


def wrong(verdicts: Found) -> list[str]:
    """Returns lines on pairs that are broken, refused without need, or not refused any more."""
    lines = []
    for (host, left, right), verdict in sorted(verdicts.items()):
        name, reason = f"{host}: {left} + {right}", expected(host, left, right)
        if verdict.status == "broken":
            case = case_of(host, left, right)
            assert case is not None
            lines.append(f"BROKEN {name}: {verdict.law}: {verdict.text[:200]}")
            lines.append(f"  python -m tests.fuzz --case '{case.dumps()}'")
        elif verdict.status == "refused":
            if reason is None or not re.search(reason, verdict.text):
                lines.append(f"NOT EXPECTED to be refused: {name}: {verdict.text[:200]}")
        elif (left, right) in TOGETHER:
            lines.append(f"NOT REFUSED any more: {name}")
    return lines


def show(verdicts: Found) -> str:
    """Returns a text: what is wrong, and the refused pairs by reason."""
    reasons: dict[str, list[str]] = {}
    count = dict.fromkeys(("ok", "refused", "broken"), 0)
    for (host, left, right), verdict in sorted(verdicts.items()):
        count[verdict.status] += 1
        if verdict.status == "refused":
            reason = f"{verdict.law}: {verdict.text[:200]}"
            reasons.setdefault(reason, []).append(f"{host}: {left} + {right}")
    lines = wrong(verdicts)
    for reason, names in sorted(reasons.items()):
        lines.append(f"refused, {reason}")
        lines += [f"  {name}" for name in names]
    return "\n".join([*lines, f"{len(verdicts)} pairs: {count}"])


def main() -> int:
    """The command line; 1 if a pair is not as it is to be."""
    parser = argparse.ArgumentParser(prog="python -m tests.pairs", description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of all pairs")
    parser.add_argument("--skip", type=float, default=0.0, help="share to leave out before that")
    parser.add_argument("--host", choices=HOSTS, action="append")
    parser.add_argument("--with", dest="feature", choices=list(FEATURES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--patience", type=float, default=10.0, help="seconds")
    asked = parser.parse_args()
    wanted = []
    for host in asked.host or HOSTS:
        of_host = [pair for pair in pairs(host) if asked.feature is None or asked.feature in pair]
        first, count = (round(len(of_host) * value) for value in (asked.skip, asked.share))
        wanted += [(host, *value) for value in of_host[first : first + count]]
    verdicts = run_pairs(wanted, processes=asked.processes, patience=asked.patience)
    print(show(verdicts))
    return int(bool(wrong(verdicts)))


if __name__ == "__main__":
    sys.exit(main())
