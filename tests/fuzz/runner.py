"""Runs cases on teams of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fuzz import laws
from tests.fuzz.case import Case
from tests.fuzz.laws import Verdict, judge
from tests.fuzz.pool import Team
from tests.fuzz.worker import Leg, Report, play

__all__ = ["Runner"]

# After so many cases a team starts anew: what a case leaves behind must not add up.
_CASES_OF_A_TEAM = 100
_TEAMS = 5  # kept at a time; each process has the memory of a torch


class Runner:
    """Runs one case at a time; keeps a team for each number of ranks.

    Args:
        patience: seconds in which ranks do nothing before they count as hung.
    """

    def __init__(self, patience: float = 10.0) -> None:
        self.patience = patience
        self._teams: dict[tuple[int, str], Team] = {}
        self._cases: dict[tuple[int, str], int] = {}  # of the team of that size and store

    def run(self, case: Case) -> Verdict:
        """The verdict on a case; what torch's class cannot do without a hook counts as refused."""
        verdict = self._run(case)
        if verdict.status == "broken" and case.host == "torch" and case.change is None:
            plain = verdict if "plain" in case.setting else self._run(case.without_hook())
            if plain.status == "broken":
                return Verdict("refused", "torch", f"without a hook, too: {plain.law}")
        return verdict

    def _run(self, case: Case) -> Verdict:
        saved: tuple[bytes, ...] = ()
        before: Sequence[Report] = ()
        legs = case.legs if case.change is None else ()
        for number, size in enumerate((case.world, *legs)):
            leg = Leg(case, number, saved)
            reports = self._team(size, case.store).run(play, leg)
            self._cases[size, case.store] += 1
            verdict = judge(case, reports)
            if verdict.status != "ok":
                self.restart(size)
                return verdict
            if number and laws.keeps_sums(case):
                verdict = laws.continues(before, reports)
                if verdict.status != "ok":
                    return verdict
            before, saved = reports, tuple(report.state for report in reports)
        return Verdict("ok")

    def restart(self, size: int | None = None) -> None:
        """Ends the team of that size, or all: the next case gets new processes."""
        for team in [value for value in self._teams if size in (None, value[0])]:
            self._teams.pop(team).close()

    def _team(self, size: int, store: str) -> Team:
        kind = size, store
        team = self._teams.pop(kind, None)  # and put back as the last one that was used
        if team is None or not team.usable or self._cases[kind] >= _CASES_OF_A_TEAM:
            if team is not None:
                team.close()
            while len(self._teams) >= _TEAMS:
                self._teams.pop(next(iter(self._teams))).close()
            team = Team(size, self.patience, store)
            self._cases[kind] = 0
        self._teams[kind] = team
        return team
