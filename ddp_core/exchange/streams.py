"""The stream driver: for backends whose ``wait`` orders streams instead of blocking the caller.

On CUDA with NCCL, and on any device whose work is queued on streams (XPU, NPU), an exchange runs to
its end inside the hook call: encoding, waiting and decoding are only enqueued, on a side stream, so
the backward pass goes on meanwhile. All ranks launch
buckets in the same order, and a bucket's collectives follow each other, so the order of collectives
is the same everywhere. With a backend that blocks (Gloo on CUDA tensors) the same code is correct
and slow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.exchange.task import Task, clock

__all__ = ["Streams", "stream_module"]


def stream_module(device: str) -> Any:
    """Returns torch's module for a type of device (``torch.cuda``), which has its streams.

    Raises:
        RuntimeError: there is none, or it has no streams.
    """
    module: Any = None
    with suppress(RuntimeError, AttributeError):
        module = torch.get_device_module(device)
    missing = [name for name in ("Stream", "current_stream", "stream") if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            f"a communication hook runs on the CPU, or on a device whose work is queued on "
            f"streams: torch.{device} has no {' and no '.join(missing)}, so what a bucket on "
            f"{device!r} holds could be sent before it is computed. Train on another device"
        )
    return module


class Streams:
    """Drives exchanges on one side stream per device.

    Args:
        group: ranks and backend of all collectives.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._streams: dict[torch.device, Any] = {}

    def run(self, task: Task, device: torch.device) -> torch.futures.Future[Tensor]:
        """Enqueues the whole exchange and returns the future of its result."""
        on_host = device.type == "cpu"
        on_side_stream = nullcontext() if on_host else self._side_stream(device)
        future: torch.futures.Future[Tensor | None]
        future = torch.futures.Future(devices=None if on_host else [device])
        chained = future.then(task.outcome)
        with on_side_stream:
            self._exhaust(task)
            # The tensor and not None: a future makes who waits for it wait for the streams of its
            # value's devices, and only for these.
            future.set_result(task.result)
        return chained

    def following(self) -> AbstractContextManager[object]:
        """Makes the side streams current, behind what the caller's streams have to do so far."""
        streams = ExitStack()
        for device in list(self._streams):
            streams.enter_context(self._side_stream(device))
        return streams

    def _side_stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Makes the side stream current, after all that the caller's stream has to do so far."""
        module = stream_module(device.type)
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = module.Stream(device=device)
        side.wait_stream(module.current_stream(device))
        stream: AbstractContextManager[None] = module.stream(side)
        return stream

    def close(self) -> None:
        """Forgets the streams."""
        self._streams.clear()

    def _exhaust(self, task: Task) -> None:
        request = task.advance()
        while request is not None:
            error: BaseException | None = None
            row = task.rows[-1]
            row.issued = clock()
            try:
                request.issue(self._group).wait()
            except Exception as raised:
                error = task.failed(raised)
            row.done = clock()
            request = task.advance(error)
