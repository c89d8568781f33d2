"""Describes how fast a device computes the parts of a scheme between its collectives."""

from __future__ import annotations

import ctypes
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.core._scheme import Scheme
from commhooks.core._settings import shown
from commhooks.hook._engine import Engine
from commhooks.predict._exchange_plan import STEADY_STEP, Work, meta_result, trace_exchange
from ddp_core import as_request

__all__ = [
    "DEFAULT_DEVICE",
    "DEVICES",
    "TAKE_TURNS",
    "Contention",
    "Device",
    "ThisDevice",
    "device",
    "measure_contention",
    "time_addition",
    "time_parts",
]


LOG = logging.getLogger("commhooks")

_NEEDED = 300 * 2**20  # bytes of a GPU, its library's workspace included
_STEP_S = 0.03  # of the step's computations in a turn, about
_TURNS = 5
_Work = Callable[[], object]


class Contention(NamedTuple):
    """Describes by how many seconds backward gets longer per second of a scheme's computations.

    1 means that both take turns, as on one core; 0 that neither slows the other.

    Attributes:
        first: of a bucket's computations before its first message.
        later: of computations after a message, and while one travels.
        moving: of the processor's moving the bytes of messages.
    """

    first: float
    later: float
    moving: float


TAKE_TURNS = Contention(1.0, 1.0, 1.0)


def measure_contention(device: torch.device | str = "cpu") -> Contention:
    """Measures by how many seconds a step gets longer per second of other computations.

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
    """Returns torch's module for a device, and the reason if it cannot be measured on."""
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
    left, right, total = torch.ones(3, entries, dtype=torch.float32, device=device)
    return (lambda: torch.mm(a, b, out=product)), (lambda: torch.add(left, right, out=total))


def _share_on_cpu(step: _Work, side: _Work) -> float:
    """Measures the contention of two threads on the cores of this process."""
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
    """Measures the contention of two streams."""
    step_stream = module.current_stream(device)
    # Of high priority, as those of exchanges (ddp_core.exchange._streams).
    side_stream = module.Stream(device=device, priority=-1)

    def seconds(stream: Any, *enqueue: _Work) -> float:
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        module.synchronize(device)
        begin.record(stream)
        for work in enqueue:
            work()
        end.record(stream)
        module.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3

    def on_side(calls: int) -> None:
        with module.stream(side_stream):
            _repeat(side, calls)

    for _ in range(2):  # libraries and kernels are loaded
        step_s, side_s = seconds(step_stream, step), seconds(side_stream, lambda: on_side(1))
    calls = max(4, round(_STEP_S / step_s))
    # The side is over before the step. Some of the step is enqueued first: its stream would be idle
    # while the host enqueues the side.
    side_calls, first = max(1, round(calls * step_s / side_s / 2)), calls // 4
    shares = []
    for _ in range(_TURNS):
        alone_s = seconds(step_stream, lambda: _repeat(step, calls))
        side_s = seconds(side_stream, lambda: on_side(side_calls))
        took_s = seconds(
            step_stream,
            lambda: _repeat(step, first),
            lambda: on_side(side_calls),
            lambda: _repeat(step, calls - first),
        )
        shares.append(_share(took_s - alone_s, side_s))
    return statistics.median(shares)


def _share(longer_s: float, side_s: float) -> float:
    """Returns the increase of the step's time per second of the other work.

    At most 1: a larger value is noise, or an effect of the cache on the products, which a backward
    pass with its large tensors does not have. If no other work ran, 1 is assumed.
    """
    return min(max(longer_s / side_s, 0.0), 1.0) if side_s else 1.0


def _seconds(work: _Work) -> float:
    """Returns the seconds of a call: the median of nine, after two warm-up calls."""
    _repeat(work, 2)
    return statistics.median(_timed(work) for _ in range(9))


def _timed(work: _Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _repeat(work: _Work, calls: int) -> None:
    for _ in range(calls):
        work()


# ---- computations of a scheme


# Bytes that drive everything else out of a cache, as backward does between two parts.
_CACHE = 64 * 2**20


def time_parts(
    scheme: Scheme,
    shapes: tuple[torch.Size, ...],
    ranks: int,
    device: torch.device,
    *,
    repeats: int = 3,
) -> tuple[float, ...]:
    """Returns the seconds of each part of a bucket's exchange, as ``ExchangePlan.work`` has them.

    The exchange runs on random gradients, and gets results of the right shape from collectives
    that do not take place. On a GPU the times include the launches.

    Args:
        scheme: the scheme, wrappers included.
        shapes: of the bucket's parameters.
        ranks: number of ranks of the job, which decides the sizes of shards.
        device: where the gradients are.
        repeats: runs of which the median counts; two more warm up.
    """
    layout = Layout([f"p{i}" for i in range(len(shapes))], shapes)
    engine = Engine(scheme, rank=0, world_size=ranks)
    engine.step = STEADY_STEP
    gradient = torch.randn(layout.numel, device=device, dtype=torch.float32)
    runs = []
    for turn in range(repeats + 2):
        engine.step = STEADY_STEP + turn
        moments = list(_moments(engine, gradient.clone(), layout))
        if turn >= 2:
            runs.append([end - begin for begin, end in moments])
    return tuple(statistics.median(parts) for parts in zip(*runs, strict=True))


def time_addition(numel: int, device: torch.device, *, repeats: int = 5) -> float:
    """Measures the seconds in which two float32 tensors are added to a third one."""
    a, b, out = torch.ones(3, numel, device=device)
    leave, now = _leaving(device), _clock(device)
    runs = []
    for _ in range(repeats + 1):
        begin = leave()
        torch.add(a, b, out=out)
        runs.append(now() - begin)
    return statistics.median(runs[1:])


def _moments(engine: Engine, gradient: Tensor, layout: Layout) -> Iterator[tuple[float, float]]:
    """Yields begin and end of each part of one exchange, in seconds."""
    now, leave = _clock(gradient.device), _leaving(gradient.device)
    engine.begin_bucket(0, is_last=True)
    begin = leave()
    exchange = engine.exchange(gradient, layout)
    try:
        request = as_request(next(exchange))
        while True:
            yield begin, now()
            begin = now()
            request.run_overlap()  # what it reads is still in the cache, as in training
            yield begin, now()
            result = meta_result(request, engine.world_size)
            if result is not request.tensor:
                # Every rank is assumed to send what this rank sends.
                result.copy_(request.tensor.expand(result.shape))
            begin = leave()
            request = as_request(exchange.send(result))
    except StopIteration:
        yield begin, now()


def _leaving(device: torch.device) -> Callable[[], float]:
    """Returns a function that leaves caches and memory as backward does, and returns the time."""
    now, trim = _clock(device), _trim(device)
    memory = torch.empty(_CACHE // 4, device=device)

    def leave() -> float:
        memory.zero_()
        trim(0)
        return now()

    return leave


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.perf_counter

    def synchronised() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return synchronised


def _trim(device: torch.device) -> Callable[[int], object]:
    """Returns a function that gives free memory back to the system (glibc), or does nothing.

    Training does so when it frees activations. An exchange then allocates new memory, whose pages
    the system makes one by one: half of the time of eden on a CPU, a third of int4.
    """
    if device.type == "cpu":
        with suppress(OSError, AttributeError):
            return cast("Callable[[int], object]", ctypes.CDLL(None).malloc_trim)
    return lambda _: None


# ---- devices


@dataclass(frozen=True)
class Device:
    """Describes the speed of a device.

    Attributes:
        name: shown in tables.
        bandwidth: bytes per second that operations read and write.
        call_s: seconds that an operation takes beside its bytes.
        flops: floating-point operations per second in training, for built-in models.
        contention: seconds that they take from backward, see
            :class:`commhooks.predict.Contention`.
        source: where the numbers are from.
    """

    name: str
    bandwidth: float
    call_s: float
    flops: float
    contention: Contention = TAKE_TURNS
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.contention, Contention):
            raise TypeError(
                f"Device(contention=...) is a commhooks.predict.Contention, got "
                f"{shown(self.contention)}"
            )

    def seconds(self, work: Work) -> float:
        """Returns the time of some computations."""
        return work.nbytes / self.bandwidth + work.calls * self.call_s

    def parts(
        self, scheme: Scheme, shapes: tuple[torch.Size, ...], ranks: int
    ) -> tuple[float, ...]:
        """Returns the seconds of each part of an exchange, as ``ExchangePlan.work`` has them."""
        return tuple(self.seconds(work) for work in trace_exchange(scheme, shapes, ranks).work)


class ThisDevice(Device):
    """Describes the device at hand, by timing exchanges of each scheme.

    A scheme is timed on two buckets; for other buckets, and above 64 ranks, whose messages would
    not fit into memory, times are extrapolated from the bytes and calls of each part.

    Args:
        device: a device of PyTorch.
        contention: what :func:`commhooks.predict.measure_contention` returns for it.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, contention: Contention = TAKE_TURNS
    ) -> None:
        super().__init__(
            str(device), float("inf"), 0.0, float("nan"), contention, source="timed here"
        )
        rates = cache(partial(_rates, torch.device(device)))
        object.__setattr__(self, "_rates", rates)
        memory = cache(partial(_memory, torch.device(device)))
        object.__setattr__(self, "_memory", memory)

    def seconds(self, work: Work) -> float:
        rate: _Rate = self._memory()  # type: ignore[attr-defined]
        return rate.call_s * work.calls + rate.byte_s * work.nbytes

    def parts(
        self, scheme: Scheme, shapes: tuple[torch.Size, ...], ranks: int
    ) -> tuple[float, ...]:
        work = trace_exchange(scheme, shapes, ranks).work
        rates: list[_Rate] = self._rates(scheme, min(ranks, _RANKS))  # type: ignore[attr-defined]
        # A bucket of vectors alone may have another number of parts: the last rate is of them all.
        known = rates[:-1] if len(work) == len(rates) - 1 else [rates[-1]] * len(work)
        return tuple(
            rate.call_s * part.calls + rate.byte_s * part.nbytes
            for rate, part in zip(known, work, strict=True)
        )


class _Rate(NamedTuple):
    call_s: float
    byte_s: float


_RANKS = 64  # with so many at most a scheme is timed
_SMALL, _LARGE = ((torch.Size([256, 256]),), (torch.Size([1024, 2048]),))


def _rates(device: torch.device, scheme: Scheme, ranks: int) -> list[_Rate]:
    """Returns the seconds per call and per byte of each part of an exchange, then of all parts."""
    work = [trace_exchange(scheme, shapes, ranks).work for shapes in (_SMALL, _LARGE)]
    times = [time_parts(scheme, shapes, ranks, device) for shapes in (_SMALL, _LARGE)]
    if len(work[0]) != len(work[1]):  # only large buckets are compressed
        work[0], times[0] = work[1], times[1]
    parts = [
        _rate(*pair) for pair in zip(zip(*work, strict=True), zip(*times, strict=True), strict=True)
    ]
    sums = [
        Work(sum(part.nbytes for part in parts), sum(part.calls for part in parts))
        for parts in work
    ]
    return [*parts, _rate((sums[0], sums[1]), (sum(times[0]), sum(times[1])))]


def _memory(device: torch.device) -> _Rate:
    """Returns the seconds per call and per byte of an operation that adds two tensors."""
    sizes = (_SMALL[0].numel(), _LARGE[0].numel())
    work = tuple(Work(12 * numel, 1) for numel in sizes)
    return _rate(work, tuple(time_addition(numel, device) for numel in sizes))


def _rate(work: tuple[Work, ...], seconds: tuple[float, ...]) -> _Rate:
    """Solves ``seconds = calls * call_s + nbytes * byte_s`` for a small and a large bucket."""
    small, large = work
    more = large.nbytes - small.nbytes
    byte_s = max(seconds[1] - seconds[0], 0.0) / more if more > 0 else 0.0
    rest = max(seconds[0] - byte_s * small.nbytes, 0.0)
    return _Rate(rest / small.calls if small.calls else 0.0, byte_s)


_SHARE = "0.8 of the memory bandwidth and 0.4 of the dense bf16 rate of the data sheet"


def _of_data_sheet(name: str, teraflops: float, gigabytes: float) -> Device:
    """Returns a GPU by its dense rate in 16 bits and its memory bandwidth per second."""
    return Device(name, 0.8 * gigabytes * 1e9, 4e-6, 0.4 * teraflops * 1e12, source=_SHARE)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("cpu", 20e9, 10e-6, 50e9, source="one core of a server, rounded"),
        # Tensor cores without sparsity. T4 and V100 have fp16 and no bf16. The whitepapers of the
        # RTX cards (GA102, Ada) give the rate that accumulates in float32, as training does; the
        # data sheet of the L4 gives twice the dense rate.
        _of_data_sheet("t4", 65, 320),
        _of_data_sheet("l4", 121, 300),
        _of_data_sheet("a10", 125, 600),
        _of_data_sheet("rtx3090", 71, 936),
        _of_data_sheet("rtx4090", 165, 1008),
        Device("v100", 0.8 * 0.9e12, 4e-6, 0.35 * 125e12, source=_SHARE),
        _of_data_sheet("a100", 312, 2000),
        _of_data_sheet("h100", 989, 3350),
        _of_data_sheet("h200", 989, 4800),
        _of_data_sheet("b200", 2250, 8000),
    )
}


DEFAULT_DEVICE = "a100"  # of the commands


def device(name: str | Device) -> Device:
    """Returns a device by name; "here" is this machine's accelerator, or its processor.

    Another GPU is two figures of its data sheet, TFLOPS and GB/s: "120:600" has 120 TFLOPS in bf16,
    dense, and a memory of 600 GB/s.

    Raises:
        ValueError: there is no such device; the message lists the known ones.
    """
    if isinstance(name, Device):
        return name
    if name == "here":
        here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        return ThisDevice(here, contention=measure_contention(here))
    if name in DEVICES:
        return DEVICES[name]
    with suppress(ValueError):
        teraflops, gigabytes = map(float, name.split(":"))
        if 0 < teraflops < math.inf and 0 < gigabytes < math.inf:
            return _of_data_sheet(name, teraflops, gigabytes)
    raise ValueError(
        f"device({shown(name)}): devices are {', '.join(DEVICES)}, here, or two figures of a data "
        f"sheet, TFLOPS:GB/s, as in 120:600"
    )
