"""Computes Student's intervals of means over a few seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit  # scipy.stats takes as long to import as torch

__all__ = ["interval"]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean, and half the width of its 95 % interval (Student's t).

    The half is NaN for a single value.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, math.nan
    quantile = float(stdtrit(count - 1, 0.975))
    return mean, quantile * statistics.stdev(values) / math.sqrt(count)
