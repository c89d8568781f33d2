"""Describes how fast a device computes what a scheme computes between its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch

from commhooks.core.scheme import Scheme
from commhooks.core.settings import shown
from commhooks.predict.codec import time_addition, time_parts
from commhooks.predict.contention import TAKE_TURNS, Contention, measure_contention
from commhooks.predict.planned import Work, planned

__all__ = ["DEVICES", "Device", "ThisDevice", "device"]


@dataclass(frozen=True)
class Device:
    """Describes a device.

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
        """Returns the seconds of each part of a bucket's exchange, as ``Planned.work`` has them."""
        return tuple(self.seconds(work) for work in planned(scheme, shapes, ranks).work)


class ThisDevice(Device):
    """Describes the device at hand, by timing exchanges of each scheme.

    A scheme is timed on two buckets; on others, times follow the bytes and calls of each part. So
    they do above 64 ranks, whose messages would all have to be in memory.

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
        work = planned(scheme, shapes, ranks).work
        rates: list[_Rate] = self._rates(scheme, min(ranks, _RANKS))  # type: ignore[attr-defined]
        # A bucket of vectors alone may have another number of parts: the last rate is of them all.
        known = rates[:-1] if len(work) == len(rates) - 1 else [rates[-1]] * len(work)
        return tuple(
            rate.call_s * one.calls + rate.byte_s * one.nbytes
            for rate, one in zip(known, work, strict=True)
        )


class _Rate(NamedTuple):
    call_s: float
    byte_s: float


_RANKS = 64  # with so many at most a scheme is timed
_SMALL, _LARGE = ((torch.Size([256, 256]),), (torch.Size([1024, 2048]),))


def _rates(device: torch.device, scheme: Scheme, ranks: int) -> list[_Rate]:
    """Returns the seconds per call and per byte of each part of an exchange, then of all parts."""
    work = [planned(scheme, shapes, ranks).work for shapes in (_SMALL, _LARGE)]
    times = [time_parts(scheme, shapes, ranks, device) for shapes in (_SMALL, _LARGE)]
    if len(work[0]) != len(work[1]):  # only large buckets are compressed
        work[0], times[0] = work[1], times[1]
    parts = [
        _rate(*pair) for pair in zip(zip(*work, strict=True), zip(*times, strict=True), strict=True)
    ]
    sums = [
        Work(sum(one.nbytes for one in parts), sum(one.calls for one in parts)) for parts in work
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
DEVICES: dict[str, Device] = {
    one.name: one
    for one in (
        Device("cpu", 20e9, 10e-6, 50e9, source="one core of a server, rounded"),
        Device("v100", 0.8 * 0.9e12, 4e-6, 0.35 * 125e12, source=_SHARE),
        Device("a100", 0.8 * 2.0e12, 4e-6, 0.4 * 312e12, source=_SHARE),
        Device("h100", 0.8 * 3.35e12, 4e-6, 0.4 * 989e12, source=_SHARE),
        Device("h200", 0.8 * 4.8e12, 4e-6, 0.4 * 989e12, source=_SHARE),
        Device("b200", 0.8 * 8.0e12, 4e-6, 0.4 * 2250e12, source=_SHARE),
    )
}


def device(name: str | Device) -> Device:
    """Returns a device by name; "here" is the accelerator of this machine, or its processor.

    Raises:
        ValueError: there is no such device; the message lists those that there are.
    """
    if isinstance(name, Device):
        return name
    if name == "here":
        here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        return ThisDevice(here, contention=measure_contention(here))
    if name not in DEVICES:
        raise ValueError(f"device({shown(name)}): devices are {', '.join(DEVICES)}, here")
    return DEVICES[name]
