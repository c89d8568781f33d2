"""Compares the step times of two kinds of communication, with the noise of the difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Gap", "Kind", "gap_of", "is_large", "kind_of", "may_be_worth"]

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


def kind_of(seconds: Sequence[float]) -> Kind:
    low, _, high = statistics.quantiles(seconds, n=4)
    return Kind(statistics.median(seconds), low, high, len(seconds))


def gap_of(durations: Sequence[Mapping[str, Sequence[float]]], kind: str, base: str) -> Gap:
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


def is_large(gap: Gap, kind: Kind) -> bool:
    return gap.seconds > max(gap.noise_s, _SMALL * kind.median_s)


def may_be_worth(gap: Gap, kind: Kind) -> bool:
    return gap.seconds + gap.noise_s > _WORTH * kind.median_s
