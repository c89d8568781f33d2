"""Measures how much computations on the side slow down those of a step, on the device at hand."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["ALL", "Contention", "measure_contention"]

_STEP_S = 0.03  # of the step's computations in a turn, at least
_TURNS = 5
_Work = Callable[[], object]


class Contention(NamedTuple):
    """Describes by how many seconds backward is longer per second of an exchange's computations.

    1: both take turns, as on one core; 0: neither notices the other.

    Attributes:
        first: for a bucket's computations before its first message.
        later: for further ones, and for those that move the bytes of messages.
    """

    first: float
    later: float


ALL = Contention(1.0, 1.0)  # as on one core


def measure_contention(device: torch.device | str = "cpu") -> Contention:
    """Returns what an exchange's computations take from backward on the device at hand.

    Products of matrices stand in for backward, and sums of large tensors for a scheme. On a CPU
    both run in threads of their own, as messages and later computations do; a bucket's first ones
    run in backward's thread. On a GPU all run on another stream than backward.

    Takes half a second. Ranks that share a machine measure at the same time, as in training.

    Args:
        device: a device of PyTorch.

    Example:
        >>> 0 <= measure_contention("cpu").later <= 1
        True
    """
    device = torch.device(device)
    on_cpu = device.type == "cpu"
    beside = _beside_on_cpu if on_cpu else _beside_on_gpu
    step, side = _works(device)
    wait = _waits_for(device)
    step_s, side_s = _seconds(step, wait), _seconds(side, wait)
    calls = max(1, round(_STEP_S / step_s))
    shares = []
    for _ in range(_TURNS):
        alone_s = _timed(lambda: _repeat(step, calls), wait)
        took_s, side_calls = beside(step, calls, side, max(1, round(alone_s / side_s / 2)), device)
        shares.append((took_s - alone_s) / (side_calls * side_s))
    share = min(max(statistics.median(shares), 0.0), 1.0)
    return Contention(1.0 if on_cpu else share, share)


def _works(device: torch.device) -> tuple[_Work, _Work]:
    """Returns an operation of a step and one of a scheme, which fill the device."""
    width, entries = (512, 1 << 20) if device.type == "cpu" else (4096, 1 << 26)
    a, b, product = torch.ones(3, width, width, device=device)
    x, y, total = torch.ones(3, entries, device=device)
    return (lambda: torch.mm(a, b, out=product)), (lambda: torch.add(x, y, out=total))


def _beside_on_cpu(
    step: _Work, calls: int, side: _Work, _: int, __: torch.device
) -> tuple[float, int]:
    """Returns the seconds of the step's calls, and the side's calls in a thread meanwhile."""
    over, done = threading.Event(), 0

    def run() -> None:
        nonlocal done
        while not over.is_set():
            side()
            done += 1

    thread = threading.Thread(target=run, name="commhooks contention")
    thread.start()
    try:
        took_s = _timed(lambda: _repeat(step, calls), _nothing)
    finally:
        over.set()
        thread.join()
    return took_s, max(done, 1)


def _beside_on_gpu(
    step: _Work, calls: int, side: _Work, side_calls: int, device: torch.device
) -> tuple[float, int]:
    """Returns the seconds of the step's calls, and the side's calls on a stream meanwhile.

    The side has half of the step's time, so that it is over first.
    """
    module = torch.get_device_module(device.type)
    here, other = module.current_stream(device), module.Stream(device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    begin.record(here)
    other.wait_event(begin)
    with module.stream(other):
        _repeat(side, side_calls)
    _repeat(step, calls)
    end.record(here)
    module.synchronize(device)
    return begin.elapsed_time(end) / 1e3, side_calls


def _seconds(work: _Work, wait: _Work) -> float:
    """Returns the seconds of a call, the median of some after two that warm up."""
    _repeat(work, 2)
    return statistics.median(_timed(work, wait) for _ in range(9))


def _timed(work: _Work, wait: _Work) -> float:
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def _repeat(work: _Work, calls: int) -> None:
    for _ in range(calls):
        work()


def _waits_for(device: torch.device) -> _Work:
    return _nothing if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)


def _nothing() -> None:
    return
