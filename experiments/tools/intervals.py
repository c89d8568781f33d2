"""Computes Student's intervals of means over a few seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student

__all__ = ["interval"]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean, and half the width of its 95 % interval (Student's t).

    The half is NaN for a single value.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, math.nan
    quantile = float(student.ppf(0.975, count - 1))
    return mean, quantile * statistics.stdev(values) / math.sqrt(count)
