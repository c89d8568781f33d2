"""Times calls on a GPU, by events and by replays of a graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["behind_a_sleep", "host_microseconds", "milliseconds", "replayed"]


def milliseconds(calls: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Returns the median milliseconds of a call, over turns that make all calls in sequence."""
    for call in calls:
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Keeps the device busy while the host launches the calls that are timed: otherwise the
        # time of the host's launches would be counted.
        calls[-1]()
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def replayed(call: Callable[[], Any], repeats: int) -> float:
    """Returns the median milliseconds of a call in a CUDA graph of ten, without launch costs."""
    call()  # compiles; a capture does not allow that
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    return milliseconds([graph.replay], repeats) / 10


def host_microseconds(call: Callable[[], Any], repeats: int, calls: int = 1) -> float:
    """Returns the median microseconds of the host for each of ``calls`` calls in a row.

    The device is idle before the first.
    """
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return statistics.median(times[2:]) * 1e6


def behind_a_sleep(call: Callable[[], Any], repeats: int, cycles: int) -> float:
    """Returns the median milliseconds of the device for a call that is enqueued while it sleeps."""
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])
