"""Compares kinds of steps that had their turns one after the other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Gap", "Kind", "gap_of", "kind_of"]

# A difference below this share of a step is called none, however exactly it was measured: a
# scheme's own computations take as much.
_SMALL = 0.02
# And one that may be above this share, for all the measurement knows, was not measured well enough
# to say that it is small.
_WORTH = 0.1


@dataclass(frozen=True)
class Kind:
    """Holds the step times of one kind of communication.

    Attributes:
        median_s: seconds of a step.
        low_s, high_s: the middle half of the steps is between them.
        steps: number of steps.
    """

    median_s: float
    low_s: float
    high_s: float
    steps: int


@dataclass(frozen=True)
class Gap:
    """Holds a difference of step times.

    Attributes:
        seconds: median over the turns of the difference of their medians.
        noise_s: twice its standard error, by the turns or by the steps, whichever is more; a
            smaller difference may be chance.
    """

    seconds: float
    noise_s: float

    def is_large(self, kind: Kind) -> bool:
        """Whether it is more than chance, and than what is worth a word, beside a step."""
        return self.seconds > max(self.noise_s, _SMALL * kind.median_s)

    def may_be_worth(self, kind: Kind) -> bool:
        """Whether the noise is such that it may be a good part of a step."""
        return self.seconds + self.noise_s > _WORTH * kind.median_s

    def is_impossible(self, kind: Kind) -> bool:
        """Whether sending less took longer by more than chance: something else took the time."""
        return self.seconds < -max(self.noise_s, _SMALL * kind.median_s)


def kind_of(seconds: Sequence[float]) -> Kind:
    """Returns the median of step times, and the middle half."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return Kind(statistics.median(seconds), low, high, len(seconds))


def gap_of(durations: Sequence[Mapping[str, Sequence[float]]], kind: str, base: str) -> Gap:
    """Returns the difference of two kinds of steps, with its noise."""
    gaps = [statistics.median(turn[kind]) - statistics.median(turn[base]) for turn in durations]
    # Turns that differ by the same each time say little if there are two of them: not below what
    # the steps by themselves leave open.
    parts = [_error([s for turn in durations for s in turn[one]]) for one in (kind, base)]
    return Gap(statistics.median(gaps), 2 * max(_error(gaps), math.hypot(*parts)))


def _error(values: Sequence[float]) -> float:
    """Returns the standard error of a median, by the median distance from it."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    # 1.25: the standard error of a median over that of a mean.
    return 1.25 * spread / math.sqrt(len(values))
