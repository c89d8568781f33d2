"""A pretended device with streams: what is enqueued there runs when the test lets it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch


class Device:
    """Stands for ``torch.cuda``: all streams share one queue, which runs up to ``done``.

    Attributes:
        enqueued: milliseconds of work that was enqueued.
        done: milliseconds of it that have run.
        pace: milliseconds that pass with every event.
        events: the number of events that were recorded.
        devices: what was made the current device, by entering; None after leaving.
        capturing: whether the current stream is being captured.
    """

    def __init__(self):
        self.enqueued = self.done = self.pace = 0.0
        self.events = 0
        self.devices = []
        self.capturing = False
        self.streams = [
            SimpleNamespace(wait_stream=lambda other: None, synchronize=self.synchronize)
        ]

    def work(self, milliseconds):
        """Enqueues work."""
        self.enqueued += milliseconds

    def synchronize(self):
        """Runs all that was enqueued."""
        self.done = self.enqueued

    # ---- of torch.cuda

    def is_available(self):
        return True

    def Stream(self, device=None, priority=0):
        return SimpleNamespace(device=device, wait_stream=lambda other: None)

    def current_stream(self, device=None):
        return self.streams[-1]

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        yield
        self.streams.pop()

    @contextmanager
    def device(self, device):
        self.devices.append(device)
        yield
        self.devices.append(None)

    def is_current_stream_capturing(self):
        return self.capturing

    def Event(self, enable_timing=False):
        return Event(self, enable_timing)


class Event:
    def __init__(self, device, timing):
        self.device, self.timing, self.at, self.stream = device, timing, None, None

    def record(self, stream=None):
        self.device.events += 1
        self.device.work(self.device.pace)
        self.at = self.device.enqueued
        self.stream = stream or self.device.current_stream()

    def query(self):
        return self.at <= self.device.done

    def elapsed_time(self, end):
        assert self.timing
        assert end.timing
        assert self.query()
        assert end.query()
        return end.at - self.at


class Marks:
    """Stands for the marks whose numbers a device writes into memory of the host."""

    def __init__(self, device):
        self.device, self.events = torch.get_device_module(device.type), []

    def enqueue(self):
        self.events.append(self.device.Event())
        self.events[-1].record()
        return len(self.events)

    def latest(self):
        return sum(event.query() for event in self.events)


def pretend(monkeypatch):
    """Makes every device that is not the CPU a pretended one, and returns it."""
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    return device
