"""``python -m tests.mutants``: plants every bug and says which are not found.

Some 550 runs of pytest, each in a copy of the source: an hour on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.mutants.mutant import planted_bugs
from tests.mutants.runner import Outcome, run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only bugs whose name, place or test has a word")
    parser.add_argument("--jobs", type=int, default=2, help="how many side by side")
    parser.add_argument("--list", action="store_true", help="names and tests, nothing is run")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in planted_bugs()
        if not arguments.words
        or any(word in f"{mutant.name} {mutant.where} {mutant.test}" for word in arguments.words)
    ]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.where}: {mutant.name}\n    {mutant.test}")
        return 0
    ended = 0

    def report(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        mutant = outcome.mutant
        print(
            f"{ended:3}/{len(chosen)} {outcome.verdict:8} {outcome.seconds:5.0f} s  "
            f"{mutant.where}: {mutant.name}",
            flush=True,
        )
        if not outcome.is_killed:
            print(f"        {mutant.test}\n{outcome.text}", flush=True)

    outcomes = run_all(chosen, arguments.jobs, report)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()))
    return 0 if all(outcome.is_killed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
