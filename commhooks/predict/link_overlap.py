"""Measures what share of the latency messages of several buckets have in common on Gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_core import AllReduce

__all__ = ["measured_overlap", "shared"]

_NUMEL = 256  # of a small message
# So often in a row that a measurement takes about this long: where latency is a processor's work,
# one message alone takes 0.2 or 3 ms, as the scheduler has it.
_BURST_S, _BURST = 20e-3, 20
_AT_LEAST, _AT_MOST = 3, 9
_BUDGET = 0.2  # share of the whole measurement's


def measured_overlap(
    group: Any, highest: Callable[[Sequence[float]], list[float]], budget_s: float
) -> float:
    """Returns the share of the latency that passes for two messages at once, from 0 to 1.

    A collective of the ranks of ``group``.

    Args:
        group: the ranks, over Gloo.
        highest: returns the largest of all ranks, value by value.
        budget_s: seconds of the whole measurement.
    """
    (alone,) = highest([_seconds(group, 1, 1)])
    burst = max(1, min(_BURST, round(_BURST_S / max(alone, 1e-9))))
    pairs: list[tuple[float, float]] = []
    took = 0.0
    while len(pairs) < _AT_LEAST or (len(pairs) < _AT_MOST and took < _BUDGET * budget_s):
        one, two = highest([_seconds(group, count, burst) for count in (1, 2)])
        pairs.append((one, two))
        took += burst * (one + two)
    return shared(pairs)


def shared(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the overlap.

    Args:
        pairs: seconds of one message, and of two at once.
    """
    return min(max(2 - statistics.median(two / one for one, two in pairs), 0.0), 1.0)


def _seconds(group: Any, count: int, burst: int) -> float:
    """Returns the seconds of ``count`` small all-reduces that are issued together."""
    requests = [[AllReduce(torch.zeros(_NUMEL), "sum") for _ in range(count)] for _ in range(burst)]
    AllReduce(torch.zeros(1), "sum").issue(group).wait()  # all ranks begin at the same time
    begin = time.perf_counter()
    for some in requests:
        for work in [request.issue(group) for request in some]:
            work.wait()
    return (time.perf_counter() - begin) / burst
