"""Handles the memory of tensors on devices with streams; on the CPU there is nothing to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Marks",
    "StreamOrder",
    "as_bytes",
    "completed",
    "future_on",
    "on_device",
    "on_device_of",
    "record_stream",
    "stream_of",
    "to_device",
]


def on_device_of(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Makes the device of the first tensor the current one, if it is not the CPU."""
    return on_device(next((tensor.device for tensor in tensors), torch.device("cpu")))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, if it is not the CPU.

    Collectives of Python objects on NCCL use the current device, which is the first GPU of all
    ranks in a script that never calls ``torch.cuda.set_device``.
    """
    if device.type in ("cpu", "meta"):
        return nullcontext()
    current: AbstractContextManager[object] = torch.get_device_module(device.type).device(device)
    return current


def stream_of(device: torch.device) -> Any:
    """Returns the current stream of a device; None for one without streams."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device.type).current_stream(device)


def future_on(device: torch.device) -> torch.futures.Future[Any]:
    """Returns a future of tensors on a device; waiting for it makes streams wait for the tensors.

    A future without devices passes on tensors of a GPU without waiting.
    """
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Returns a completed future that holds a tensor."""
    future: torch.futures.Future[Tensor] = future_on(tensor.device)
    future.set_result(tensor)
    return future


def record_stream(tensor: Tensor) -> None:
    """Keeps the memory of a tensor from others until the current stream has read it.

    An allocator gives freed memory to the stream that allocated it, which does not wait for other
    streams that still read it.
    """
    stream = stream_of(tensor.device)
    if stream is not None:
        tensor.record_stream(stream)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies host values to ``device``, without waiting for earlier work of a GPU."""
    if device.type == "cpu":
        return values
    # A copy from pageable memory would wait for the whole backward pass. torch keeps pinned memory
    # for the next step, and does not hand it out before the copy is over.
    return values.pin_memory().to(device, non_blocking=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, flat in row-major order: its memory if that is contiguous."""
    flat = tensor.reshape(-1)
    if flat.numel() <= 1:  # such a slice counts as contiguous, whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.contiguous().view(torch.uint8)


class Marks:
    """Tells any thread how far a device has come, without a call to the device.

    The device writes the numbers of marks into memory of the host. A query of a CUDA event instead
    would end a CUDA graph that another thread captures.
    """

    def __init__(self, device: torch.device) -> None:
        self._enqueued = 0
        self._on_device = torch.zeros((), dtype=torch.int64, device=device)
        # Pageable memory would make the host wait for the copy.
        pinned = device.type not in ("cpu", "meta")
        self._on_host = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=pinned)

    def enqueue(self) -> int:
        """Enqueues a mark on the current stream and returns its number."""
        self._enqueued += 1
        self._on_device.fill_(self._enqueued)
        self._on_host.copy_(self._on_device, non_blocking=True)
        return self._enqueued

    def latest(self) -> int:
        """Returns the number of the latest mark that the device has passed; 0 before the first."""
        return int(self._on_host)


class StreamOrder:
    """Orders what several streams do to the same tensors, where sharing is rare.

    Work that is enqueued in a turn runs after all work of earlier turns, on any streams.
    """

    def __init__(self) -> None:
        self._ends: dict[torch.device, Any] = {}

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Makes a device's current stream wait for earlier turns; the host does not wait."""
        stream = stream_of(device)
        if stream is None:
            yield
            return
        if device in self._ends:
            stream.wait_event(self._ends[device])
        try:
            yield
        finally:
            self._ends[device] = torch.get_device_module(device.type).Event()
            self._ends[device].record(stream)
