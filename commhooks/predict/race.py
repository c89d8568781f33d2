"""Compares candidates by the times of their steps, in turns, until noise no longer decides.

A machine that is busy with something else slows whichever candidate runs at that moment. So each
candidate runs some steps in every round, and rounds go on until the others are known to be slower,
or so close that it does not matter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Entry", "Race"]

T = TypeVar("T")

_CLOSE = 0.01  # differences below this share of a step do not matter
_SURE = 2.0  # standard errors of a difference, from which it is no chance
_MOST_ROUNDS = 6


@dataclass
class Entry(Generic[T]):
    """Holds one candidate of a race.

    Attributes:
        what: the candidate.
        times: seconds of its steps so far.
        runs: whether it takes part in further rounds.
    """

    what: T
    times: list[float] = field(default_factory=list)
    runs: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def deviation(self) -> float:
        """Returns the standard error of the median, seconds; infinite for fewer than 4 steps."""
        if len(self.times) < 4:
            return math.inf
        spread = statistics.median(abs(one - self.median) for one in self.times)
        # 1.48: a normal distribution's standard deviation over its median absolute deviation;
        # 1.25: the standard error of its median over that of its mean.
        return 1.48 * 1.25 * spread / math.sqrt(len(self.times))


class Race(Generic[T]):
    """Runs candidates in rounds and drops those that are slower than the fastest.

    Args:
        candidates: in the order of the first round; the next round has the reverse order.

    Example:
        >>> race = Race(["a", "b"])
        >>> while (entry := race.next()) is not None:
        ...     race.add({"a": [1.0] * 8, "b": [2.0] * 8}[entry.what])
        >>> [(entry.what, entry.median) for entry in race.entries]
        [('a', 1.0), ('b', 2.0)]
    """

    def __init__(self, candidates: Sequence[T]) -> None:
        self.entries = [Entry(one) for one in candidates]
        self._order = list(self.entries)
        self._rounds = 0

    def next(self) -> Entry[T] | None:
        """Returns the candidate to run next; None: the race is over."""
        return self._order[0] if self._order else None

    def add(self, times: Sequence[float]) -> None:
        """Notes the seconds of the steps of the candidate that has run.

        Args:
            times: one at least.
        """
        self._order.pop(0).times += times
        if not self._order:
            self._rounds += 1
            self._end_round()

    def _end_round(self) -> None:
        running = [entry for entry in self.entries if entry.runs]
        best = min(running, key=lambda entry: entry.median)
        undecided = False
        for entry in running:
            if entry is best:
                continue
            slower = entry.median - best.median
            # Below infinity: with few steps nothing is known.
            noise = min(_SURE * math.hypot(entry.deviation, best.deviation), best.median)
            if slower > max(noise, _CLOSE * best.median):
                entry.runs = False
            elif noise > _CLOSE * best.median:
                undecided = True
        if undecided and self._rounds < _MOST_ROUNDS:
            self._order = [entry for entry in self.entries if entry.runs]
            if self._rounds % 2:
                self._order.reverse()
