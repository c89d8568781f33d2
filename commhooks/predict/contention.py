"""Measures how much computations on the side slow down those of a step, on the device at hand."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

__all__ = ["TAKE_TURNS", "Contention", "measure_contention"]

LOG = logging.getLogger("commhooks")

_NEEDED = 300 * 2**20  # bytes of a GPU, its library's workspace included
_STEP_S = 0.03  # of the step's computations in a turn, about
_TURNS = 5
_Work = Callable[[], object]


class Contention(NamedTuple):
    """Describes by how many seconds backward is longer per second of an exchange's computations.

    1: both take turns, as on one core; 0: neither notices the other.

    Attributes:
        first: for a bucket's computations before its first message.
        later: for those after a message, and while one travels.
        moving: for a processor's moving the bytes of messages.
    """

    first: float
    later: float
    moving: float


TAKE_TURNS = Contention(1.0, 1.0, 1.0)


def measure_contention(device: torch.device | str = "cpu") -> Contention:
    """Returns by how many seconds a step is longer per second of computations on the side.

    Products of matrices stand in for backward, and sums of large tensors for a scheme. On a CPU the
    products run in the caller's thread and the sums in another one, as the parts of an exchange
    after its first message do. The part before it runs in backward's thread: its share is 1. On a
    GPU the sums run on another stream. Moving bytes is not measured there: its share is 1.

    Takes half a second. Ranks that share a machine call it at the same time, as in training.

    Args:
        device: a device of PyTorch. One without streams, or without 300 MiB of free memory, is not
            measured: all shares are 1.

    Example:
        >>> measure_contention("cpu").first
        1.0
    """
    device = torch.device(device)
    if device.type == "cpu":
        share = _share_on_cpu(*_works(device, width=512, entries=1 << 22))
        return Contention(1.0, share, share)
    module, missing = _module_of(device)
    if missing:
        LOG.info("contention is not measured on %s, which has no %s: 1 is assumed", device, missing)
        return TAKE_TURNS
    try:
        works = _works(device, width=2048, entries=1 << 24)
        share = _share_on_gpu(*works, module=module, device=device)
    except torch.OutOfMemoryError:
        LOG.info("contention is not measured on %s, which has no memory left: 1 is assumed", device)
        return TAKE_TURNS
    return Contention(share, share, 1.0)


def _module_of(device: torch.device) -> tuple[Any, str]:
    """Returns torch's module for a device, and what is missing to measure on it."""
    module: Any = None
    with suppress(RuntimeError, AttributeError):
        module = torch.get_device_module(device.type)
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        if not hasattr(module, name):
            return module, name
    # Asked beforehand: an allocation that fails empties the allocator's cache first.
    if hasattr(module, "mem_get_info") and module.mem_get_info(device)[0] < _NEEDED:
        return module, "300 MiB of free memory"
    return module, ""


def _works(device: torch.device, *, width: int, entries: int) -> tuple[_Work, _Work]:
    """Returns an operation of a step and one of a scheme, whose tensors exceed most caches."""
    a, b, product = torch.ones(3, width, width, dtype=torch.float32, device=device)
    x, y, total = torch.ones(3, entries, dtype=torch.float32, device=device)
    return (lambda: torch.mm(a, b, out=product)), (lambda: torch.add(x, y, out=total))


def _share_on_cpu(step: _Work, side: _Work) -> float:
    """Measures two threads on the cores of this process."""
    step_s, side_s = _seconds(step), _seconds(side)
    calls = max(1, round(max(_STEP_S, 10 * side_s) / step_s))
    shares = []
    for _ in range(_TURNS):
        alone_s = _timed(lambda: _repeat(step, calls))
        with _Side(side) as beside:
            before = beside.calls
            took_s = _timed(lambda: _repeat(step, calls))
            done = beside.calls - before
        shares.append(_share(took_s - alone_s, done * side_s))
    return statistics.median(shares)


class _Side:
    """Repeats an operation in another thread, within a ``with`` block."""

    def __init__(self, work: _Work) -> None:
        self.calls = 0
        self._work, self._begun, self._over = work, threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="contention", daemon=True)

    def __enter__(self) -> _Side:
        self._thread.start()
        self._begun.wait()  # a thread's first operation starts PyTorch's threads
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._work()
                self.calls += 1
                self._begun.set()
        except BaseException as error:
            self._error = error
            self._begun.set()


def _share_on_gpu(step: _Work, side: _Work, *, module: Any, device: torch.device) -> float:
    """Measures two streams."""
    # Of high priority, as those of exchanges (ddp_core.exchange.streams).
    here, other = module.current_stream(device), module.Stream(device=device, priority=-1)

    def seconds(stream: Any, *enqueue: _Work) -> float:
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        module.synchronize(device)
        begin.record(stream)
        for one in enqueue:
            one()
        end.record(stream)
        module.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3

    def on_other(calls: int) -> None:
        with module.stream(other):
            _repeat(side, calls)

    for _ in range(2):  # libraries and kernels are loaded
        step_s, side_s = seconds(here, step), seconds(other, lambda: on_other(1))
    calls = max(4, round(_STEP_S / step_s))
    # The side is over before the step. Some of the step is enqueued first: its stream would be idle
    # while the host enqueues the side.
    side_calls, first = max(1, round(calls * step_s / side_s / 2)), calls // 4
    shares = []
    for _ in range(_TURNS):
        alone_s = seconds(here, lambda: _repeat(step, calls))
        side_s = seconds(other, lambda: on_other(side_calls))
        took_s = seconds(
            here,
            lambda: _repeat(step, first),
            lambda: on_other(side_calls),
            lambda: _repeat(step, calls - first),
        )
        shares.append(_share(took_s - alone_s, side_s))
    return statistics.median(shares)


def _share(longer_s: float, side_s: float) -> float:
    """Returns the share of the side's seconds by which the step is longer.

    At most 1: more is noise, or what the products' matrices lose of a cache. A backward pass reads
    too much to find its tensors there anyway. Where nothing ran on the side, 1 is assumed.
    """
    return min(max(longer_s / side_s, 0.0), 1.0) if side_s else 1.0


def _seconds(work: _Work) -> float:
    """Returns the seconds of a call, the median of nine after two that warm up."""
    _repeat(work, 2)
    return statistics.median(_timed(work) for _ in range(9))


def _timed(work: _Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _repeat(work: _Work, calls: int) -> None:
    for _ in range(calls):
        work()
