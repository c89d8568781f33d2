"""Computes Student's intervals of means over a few seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit  # scipy.stats takes as long to import as torch

__all__ = ["interval"]


def interval(
    values: Sequence[float], level: float = 0.95, least: float = 0.0
) -> tuple[float, float]:
    """Returns the mean, and half the width of its interval (Student's t).

    The half is NaN for a single value.

    Args:
        values: of the runs.
        level: probability with which the interval covers the mean.
        least: smallest standard deviation that counts, for values such as equal counts.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, math.nan
    quantile = float(stdtrit(count - 1, (1 + level) / 2))
    deviation = max(statistics.stdev(values), least)
    return mean, quantile * deviation / math.sqrt(count)
