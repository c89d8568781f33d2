"""Reads the time of the host, and of devices, which run behind the host.

On a GPU the host's clock shows when work was enqueued. Events in the streams show when it is done;
they are read later, once the device has reached them, without waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "HOST",
    "UNKNOWN",
    "Clock",
    "Timed",
    "Timestamp",
    "clock_of",
    "event_after",
    "is_capturing",
    "set_time",
]

# Elapsed times are float32: within seconds of the event that they count from they are exact to
# microseconds.
_ORIGIN_SECONDS = 1.0


class Timestamp:
    """Holds a point in a device's work; its time is known once the device has reached it."""

    __slots__ = ("_event", "_module", "_origin", "_seconds")

    def __init__(
        self, module: Any, event: Any, origin: Timestamp | None, seconds: float = math.nan
    ) -> None:
        self._module, self._event, self._origin, self._seconds = module, event, origin, seconds

    def seconds(self) -> float:
        """Returns the time by the device's clock, or NaN while it is unknown; does not wait."""
        origin = self._origin
        if origin is None or is_capturing(self._module):
            return self._seconds
        if self._event.query() and origin._event.query():
            begin = origin.seconds()
            if not math.isnan(begin):
                self._seconds = begin + origin._event.elapsed_time(self._event) / 1e3
                self._origin = None
        return self._seconds


class Clock:
    """Reads the time of the host; subclasses read that of a device."""

    def now(self) -> float | Timestamp:
        """Returns the present time of the current stream, or of the host."""
        return time.perf_counter()


class _Unknown(Clock):
    def now(self) -> float:
        return math.nan


class _DeviceClock(Clock):
    """Reads the time of a device; agrees with the host's clock at the first call."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device.type)
        self._origin: Timestamp | None = None
        self._origin_set = 0.0

    def now(self) -> float | Timestamp:
        if is_capturing(self._module):
            return math.nan
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        host, before = time.perf_counter(), self._origin
        if before is None:
            self._origin, self._origin_set = Timestamp(self._module, event, None, host), host
            return self._origin
        moment = Timestamp(self._module, event, before)
        if host - self._origin_set > _ORIGIN_SECONDS:
            before.seconds()  # known by now, so that it lets go of the origin before it
            self._origin, self._origin_set = moment, host
        return moment


def is_capturing(module: Any) -> bool:
    """Whether the current stream is captured in a graph, which a query of any event would end.

    Events of a captured step do not happen in it, and cannot be queried afterwards.
    """
    query = getattr(module, "is_current_stream_capturing", None)
    return query is not None and query()


HOST, UNKNOWN = Clock(), _Unknown()
_clocks: dict[torch.device, Clock] = {}


def clock_of(device: torch.device, *, timed: bool = True) -> Clock:
    """Returns the clock of what runs on ``device``.

    Args:
        timed: with False nothing is recorded on devices other than the host, and times are NaN.
    """
    if device.type == "cpu":
        return HOST
    if not timed:
        return UNKNOWN
    if device not in _clocks:
        _clocks[device] = _DeviceClock(device)
    return _clocks[device]


class Timed:
    """Holds times, which are NaN until the device has reached them.

    Attributes:
        moments: timestamps of a device, by the attribute that receives the time.
    """

    __slots__ = ()
    moments: dict[str, Timestamp]

    def resolve(self) -> bool:
        """Fills in the times that are known by now; returns whether all are."""
        for name, moment in list(self.moments.items()):
            seconds = moment.seconds()
            if not math.isnan(seconds):
                setattr(self, name, seconds)
                del self.moments[name]
        return not self.moments


def set_time(record: Timed, name: str, now: float | Timestamp) -> None:
    """Sets a time of a record; a device's time is resolved later."""
    if isinstance(now, Timestamp):
        record.moments[name] = now
        now = math.nan
    setattr(record, name, now)


def event_after(future: Any, device: torch.device) -> Callable[[], bool]:
    """Returns a function that returns whether a device has done the work of a completed future.

    Such a future is completed when its work is enqueued; the caller's stream does not wait.
    """
    module = torch.get_device_module(device.type)
    event = module.Event()
    # The callback of `then` runs on a stream that waits for the future's work.
    future.then(lambda _: event.record(module.current_stream(device)))
    return event.query  # type: ignore[no-any-return]
