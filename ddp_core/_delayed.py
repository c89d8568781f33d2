"""Parameters that are averaged together, when another one's gradient is ready."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core._parameters import broadcast_coalesced

__all__ = ["DelayedAllReduce"]


class DelayedAllReduce:
    """One buffer whose views are the gradients of all delayed parameters.

    Args:
        parameters: all of one dtype; their gradients have to be complete at the trigger.
        trigger: parameter whose gradient starts the all-reduce.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        trigger: nn.Parameter,
        group: dist.ProcessGroup,
        *,
        chunk_nbytes: int,
    ) -> None:
        self._parameters, self.group = list(parameters), group
        numel = sum(parameter.numel() for parameter in parameters)
        self._buffer = parameters[0].detach().new_zeros(numel)
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        self._views = [
            part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)
        ]
        self._work: dist.Work | None = None
        self.synchronises = True
        broadcast_coalesced(parameters, group, source=0, chunk_nbytes=chunk_nbytes)
        me = weakref.ref(self)

        def start(grad: Tensor) -> None:
            delayed = me()
            if delayed is not None:
                delayed._start()

        trigger.register_hook(start)

    def prepare(self, *, synchronises: bool) -> None:
        """After forward: gradients are (zeroed) views of the buffer."""
        self.synchronises = synchronises
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view

    def _start(self) -> None:
        if not self.synchronises:
            return
        self._buffer.div_(self.group.size())
        self._work = dist.all_reduce(self._buffer, group=self.group, async_op=True)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _finish(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = None
