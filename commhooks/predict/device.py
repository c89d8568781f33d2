"""Describes how fast a device computes what a scheme computes between its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch

from commhooks.core.scheme import Scheme
from commhooks.core.settings import shown
from commhooks.predict.codec import time_parts
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
        contention: share of an exchange's computations that slows backward down, when both run:
            1 if both wait for the same memory or cores.
        source: where the numbers are from.
    """

    name: str
    bandwidth: float
    call_s: float
    flops: float
    contention: float = 1.0
    source: str = ""

    def seconds(self, work: Work) -> float:
        """Returns the time of some computations."""
        return work.nbytes / self.bandwidth + work.calls * self.call_s

    def parts(
        self, scheme: Scheme, shapes: tuple[torch.Size, ...], ranks: int
    ) -> tuple[float, ...]:
        """Returns the seconds of each part of a bucket's exchange, between its collectives."""
        return tuple(self.seconds(work) for work in planned(scheme, shapes, ranks).work)


class ThisDevice(Device):
    """Times exchanges on the device at hand, in place of an estimate; each is timed once.

    Args:
        device: a device of PyTorch.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(str(device), float("inf"), 0.0, float("nan"), source="timed here")
        object.__setattr__(self, "parts", cache(partial(self._timed, torch.device(device))))

    def _timed(
        self, device: torch.device, scheme: Scheme, shapes: tuple[torch.Size, ...], ranks: int
    ) -> tuple[float, ...]:
        return time_parts(scheme, shapes, ranks, device)


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
    """Returns a device by name.

    Raises:
        ValueError: there is no such device; the message lists those that there are.
    """
    if isinstance(name, Device):
        return name
    if name not in DEVICES:
        raise ValueError(f"device({shown(name)}): devices are {', '.join(DEVICES)}")
    return DEVICES[name]
