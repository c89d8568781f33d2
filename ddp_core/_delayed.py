"""Parameters that are averaged together, when another one's gradient is ready."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from ddp_core._accumulators import call_after_backward
from ddp_core._parameters import broadcast_coalesced

__all__ = ["DelayedAllReduce"]


class DelayedAllReduce:
    """One buffer whose views are the gradients of all delayed parameters.

    Args:
        parameters: all of one dtype.
        trigger: parameter whose gradient starts the all-reduce. Where gradients of ``parameters``
            are still missing then (a compiled backward pass hands all of them over at its end), it
            starts when backward is over.
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
        self._arrived: set[int] = set()  # places of gradients that this backward pass has made
        self.synchronises = True
        broadcast_coalesced(parameters, group, source=0, chunk_nbytes=chunk_nbytes)
        me = weakref.ref(self)

        def arrived(place: int, _: Tensor) -> None:
            delayed = me()
            if delayed is not None:
                delayed._arrived.add(place)

        def start(_: Tensor) -> None:
            delayed = me()
            if delayed is not None:
                delayed._start()

        for place, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(arrived, place))
        trigger.register_post_accumulate_grad_hook(start)

    def prepare(self, *, synchronises: bool) -> None:
        """After forward: gradients are views of the buffer, zeros where there were none."""
        self.synchronises = synchronises
        self._arrived.clear()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad.detach())
            parameter.grad = view

    def _start(self) -> None:
        if not self.synchronises:
            return
        work = self._all_reduce() if len(self._arrived) == len(self._parameters) else None

        def finish() -> None:
            (self._all_reduce() if work is None else work).wait()

        call_after_backward(finish)

    def _all_reduce(self) -> dist.Work:
        self._buffer.div_(self.group.size())
        work: dist.Work = dist.all_reduce(self._buffer, group=self.group, async_op=True)
        return work
