"""Computes Student's intervals of means over a few seeds."""

from __future__ import annotations

import math
import statistics

__all__ = ["interval"]

_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 95 %, two-sided, by number of seeds


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean, and half the width of its 95 % interval (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) not in _STUDENT:
        return mean, math.nan
    return mean, _STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
