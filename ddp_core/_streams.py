"""The stream driver: for backends whose ``wait`` orders streams instead of blocking the caller.

On CUDA with NCCL an exchange runs to its end inside the hook call: encoding, waiting and decoding
are only enqueued, on a side stream, so the backward pass goes on meanwhile. All ranks launch
buckets in the same order, and a bucket's collectives follow each other, so the order of collectives
is the same everywhere. With a backend that blocks (Gloo on CUDA tensors) the same code is correct
and slow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core._task import Task, clock

__all__ = ["Streams"]


class Streams:
    """Drives exchanges on one side stream per device.

    Args:
        group: ranks and backend of all collectives.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def ensure(self, rounds: int) -> None:
        """Nothing to prepare: all rounds share one group."""

    def run(self, task: Task, device: torch.device) -> torch.futures.Future[Tensor]:
        """Enqueues the whole exchange and returns the future of its result."""
        on_cuda = device.type == "cuda"
        future: torch.futures.Future[Tensor | None]
        future = torch.futures.Future(devices=[device] if on_cuda else None)
        chained = future.then(task.outcome)
        with self._side_stream(device) if on_cuda else nullcontext():
            self._exhaust(task)
            # The tensor and not None: a future makes who waits for it wait for the streams of its
            # value's devices, and only for these.
            future.set_result(task.result)
        return chained

    def _side_stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Makes the side stream current, after all that the caller's stream has to do so far."""
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device=device)
        side.wait_stream(torch.cuda.current_stream(device))
        stream: AbstractContextManager[None] = torch.cuda.stream(side)
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
