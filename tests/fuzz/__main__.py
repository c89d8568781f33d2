"""Tries random configurations in real processes.

``python -m tests.fuzz --cases 2000 --processes 2``: as many cases, two teams of ranks at a time.
``python -m tests.fuzz --seed 17``: the case of that seed; with ``--cases``, the first of so many.
``python -m tests.fuzz --case '{"scheme": "topk", ...}'``: that one; several run one after the other
in the same processes.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.case import Case
from tests.fuzz.laws import Verdict
from tests.fuzz.runner import Runner
from tests.fuzz.sample import sample
from tests.fuzz.shrink import shrink

__all__ = ["Figures", "explore"]


@dataclass
class Figures:
    """Counts of what was tried, and the findings."""

    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of refusals
    hosts: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[Case, Verdict, list[int]]] = field(default_factory=list)  # with all seeds
    steps: int = 0
    seconds: float = 0.0

    def known(self, case: Case, law: str) -> list[int] | None:
        """The seeds of the finding that explains a broken case; None if it is new."""
        for smallest, verdict, seeds in self.findings:
            if verdict.law == law and _without_scheme(smallest) <= _without_scheme(case):
                return seeds
        return None

    def show(self) -> str:
        """As text."""
        rate = self.cases / max(self.seconds, 1e-9)
        lines = [
            f"{self.cases} configurations, {self.steps} steps, {self.seconds:.0f} s "
            f"({rate:.1f} a second): {dict(self.statuses)}"
        ]
        lines.append(
            "  hosts: " + ", ".join(f"{n} {host}" for host, n in sorted(self.hosts.items()))
        )
        lines += [f"  refused {n}: {reason}" for reason, n in self.reasons.most_common()]
        for case, verdict, seeds in self.findings:
            lines.append(f"BROKEN ({verdict.law}), {len(seeds)} times, seeds {seeds[:8]}:")
            lines.append(f"  python -m tests.fuzz --case '{case.dumps()}'")
            lines.append("  " + verdict.text[:1500].replace("\n", "\n  "))
        return "\n".join(lines)


def explore(
    seeds: range,
    *,
    processes: int = 1,
    patience: float = 10.0,
    shrinks: float = 120.0,
    progress: bool = False,
) -> Figures:
    """Runs the cases of all seeds.

    Args:
        processes: teams of ranks at a time.
        shrinks: seconds for making a broken case small; 0: it is left as it is.
    """
    figures, lock, begin = Figures(), threading.Lock(), time.monotonic()

    def run(runner: Runner, seed: int) -> None:
        case = sample(seed)
        verdict = runner.run(case)
        with lock:
            figures.cases += 1
            figures.hosts[case.host] += 1
            figures.steps += case.steps * (1 + len(case.legs))
            figures.statuses[verdict.status] += 1
            if verdict.status == "refused":
                figures.reasons[f"{case.host}, {verdict.law}: {verdict.text[:160]}"] += 1
            seeds_of = figures.known(case, verdict.law) if verdict.status == "broken" else []
        if seeds_of is None:
            small, why = case, verdict
            if shrinks:
                small, why = shrink(case, verdict.law, runner.run, seconds=shrinks)
                if why.status != "broken":
                    small, why = case, _after_others(verdict)
            with lock:
                seeds_of = figures.known(case, verdict.law)
                if seeds_of is None:
                    figures.findings.append((small, why, [seed]))
                    if progress:
                        text = why.text[:600].replace("\n", "\n  ")
                        print(f"\nBROKEN ({why.law}), seed {seed}:\n  {small.dumps()}\n\n  {text}")
        if seeds_of is not None and verdict.status == "broken":
            with lock:
                seeds_of.append(seed)

        if progress and figures.cases % 20 == 0:
            seconds = time.monotonic() - begin
            print(f"{figures.cases} cases, {seconds:.0f} s, {dict(figures.statuses)}", flush=True)

    waiting, stopped = iter(seeds), threading.Event()

    def work() -> None:
        runner = Runner(patience)
        try:
            while not stopped.is_set():
                with lock:
                    seed = next(waiting, None)
                if seed is None:
                    return
                run(runner, seed)
        finally:
            runner.restart()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # what there is so far counts
        stopped.set()
    figures.seconds = time.monotonic() - begin
    return figures


def _without_scheme(case: Case) -> set[str]:
    """Returns features of a case; a law is rarely broken by the scheme or a wrong option alone."""
    return {
        feature for feature in case.features if not feature.startswith(("scheme=", "option error"))
    }


def _after_others(verdict: Verdict) -> Verdict:
    return Verdict(
        "broken",
        f"{verdict.law}, once",
        f"did not break again in new processes; a matter of timing, or of what ran before.\n"
        f"{verdict.text}",
    )


def main() -> int:
    """The command line; 1 if a law was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, help="100; the one of --seed, if that is given")
    parser.add_argument("--seed", type=int, help="of the first case")
    parser.add_argument("--processes", type=int, default=2, help="teams of ranks at a time")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds")
    parser.add_argument("--shrink", type=float, default=120.0, help="seconds for a broken case")
    parser.add_argument("--case", action="append", help="JSON, or a seed")
    arguments = parser.parse_args()
    if arguments.case or (arguments.seed is not None and arguments.cases is None):
        cases = arguments.case or [str(arguments.seed)]
        return _run_these(cases, arguments.patience, arguments.shrink)
    first = arguments.seed or 0
    figures = explore(
        range(first, first + (arguments.cases or 100)),
        processes=arguments.processes,
        patience=arguments.patience,
        shrinks=arguments.shrink,
        progress=True,
    )
    print(figures.show())
    return int(bool(figures.findings))


def _run_these(texts: list[str], patience: float, shrinks: float) -> int:
    runner, broken = Runner(patience), 0
    for text in texts:
        case = sample(int(text)) if text.isdigit() else Case.loads(text)
        verdict = runner.run(case)
        print(f"{case.dumps()}\n{verdict.status} {verdict.law}\n{verdict.text}", flush=True)
        broken += verdict.status == "broken"
        if verdict.status == "broken" and text.isdigit() and shrinks:
            small, why = shrink(case, verdict.law, runner.run, seconds=shrinks)
            print(f"\nsmaller:\n{small.dumps()}\n{why.status} {why.law}\n{why.text}")
    runner.restart()
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
