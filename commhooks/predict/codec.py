"""Times what a scheme computes between its collectives, on the device at hand."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import cast

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.hook.engine import Engine
from commhooks.predict.planned import LATE, answered
from ddp_core import as_request

__all__ = ["time_addition", "time_parts"]

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
    """Returns the seconds of each part of a bucket's exchange, in the order of ``Planned.work``.

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
    engine.step = LATE
    gradient = torch.randn(layout.numel, device=device, dtype=torch.float32)
    runs = []
    for turn in range(repeats + 2):
        engine.step = LATE + turn
        moments = list(_moments(engine, gradient.clone(), layout))
        if turn >= 2:
            runs.append([end - begin for begin, end in moments])
    return tuple(statistics.median(parts) for parts in zip(*runs, strict=True))


def time_addition(numel: int, device: torch.device, *, repeats: int = 5) -> float:
    """Returns the seconds in which two tensors of float32 are added to a third one."""
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
            result = answered(request, engine.world_size)
            if result is not request.tensor:
                # What every rank would have sent is what this one sends.
                result.copy_(request.tensor.expand(result.shape))
            begin = leave()
            request = as_request(exchange.send(result))
    except StopIteration:
        yield begin, now()


def _leaving(device: torch.device) -> Callable[[], float]:
    """Returns what leaves caches and memory as backward leaves them, and tells the time then."""
    now, trim = _clock(device), _trim(device)
    other = torch.empty(_CACHE // 4, device=device)

    def leave() -> float:
        other.zero_()
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
    """Returns what gives free memory back to the system, where the C library can (glibc).

    Training does so as it frees activations. What an exchange allocates is then new memory, whose
    pages the system makes one by one: half of the time of eden on a CPU, a third of int4.
    """
    if device.type == "cpu":
        with suppress(OSError, AttributeError):
            return cast("Callable[[int], object]", ctypes.CDLL(None).malloc_trim)
    return lambda _: None
