"""Handles the memory of tensors on devices with streams; on the CPU there is nothing to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "StreamOrder",
    "as_bytes",
    "completed",
    "future_on",
    "on_device",
    "on_device_of",
    "record_stream",
    "stream_of",
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


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, flat in row-major order: its memory if that is contiguous."""
    flat = tensor.reshape(-1)
    if flat.numel() <= 1:  # such a slice counts as contiguous, whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.contiguous().view(torch.uint8)


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
