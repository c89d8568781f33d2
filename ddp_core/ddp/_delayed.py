"""Averages some parameters together, once the gradient of another parameter is ready."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.ddp._replica import Replica
from ddp_core.reducer._autograd import (
    NO_BACKWARD,
    backward_number,
    call_after_backward,
    is_nested,
)
from ddp_core.reducer._parameters import broadcast_coalesced

__all__ = ["DelayedAllReduce"]


class DelayedAllReduce:
    """Averages all delayed parameters in one buffer, whose views are their gradients.

    The all-reduce starts as soon as the trigger and all parameters have their gradients, at the
    latest when backward is over (a compiled backward pass hands them over at its end, in any
    order; some may not be used).

    Args:
        parameters: the delayed parameters, all of one dtype.
        trigger: the parameter whose gradient starts the all-reduce.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        trigger: nn.Parameter,
        group: dist.ProcessGroup,
        *,
        chunk_nbytes: int,
    ) -> None:
        self._parameters, self._trigger = list(parameters), trigger
        broadcast_coalesced(parameters, group, source=0, chunk_nbytes=chunk_nbytes)
        self.attach(group)

    @classmethod
    def of(
        cls,
        named: Sequence[tuple[str, nn.Parameter]],
        trigger: nn.Parameter | None,
        replica: Replica,
    ) -> DelayedAllReduce | None:
        """Returns a delayed all-reduce for the arguments of DistributedDataParallel, or None."""
        if not named:
            return None
        assert trigger is not None  # checked with the names
        parameters = [parameter for _, parameter in named]
        return cls(parameters, trigger, replica.group, chunk_nbytes=replica.chunk_nbytes)

    def named(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters by their names in the module."""
        delayed = set(map(id, self._parameters))
        return {
            name: parameter
            for name, parameter in module.named_parameters()
            if id(parameter) in delayed
        }

    def attach(self, group: dist.ProcessGroup) -> None:
        """Registers the parameters' hooks, also after unpickling, which keeps parameters only."""
        self.group, self._synchronises = group, True
        sizes = [parameter.numel() for parameter in self._parameters]
        self._buffer = self._parameters[0].detach().new_zeros(sum(sizes))
        self._views = [
            part.view(parameter.shape)
            for part, parameter in zip(self._buffer.split(sizes), self._parameters, strict=True)
        ]
        self._arrived: set[int] = set()  # places of gradients that this backward pass has made
        self._triggered = False
        self._queued_in = NO_BACKWARD  # the pass at whose end `_pass_ended` is called
        self._work: dist.Work | None = None
        reference = weakref.ref(self)  # the parameters hold what is registered on them

        def arrived(place: int | None, _: Tensor) -> None:
            delayed = reference()
            if delayed is not None:
                delayed._gradient_came(place)

        for place, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(partial(arrived, place))
        self._trigger.register_post_accumulate_grad_hook(partial(arrived, None))

    def prepare(self, *, synchronises: bool) -> None:
        """Makes gradients views of the buffer, after forward; zeros where there were none."""
        self._synchronises = synchronises
        self._finish()  # of a backward pass that has raised
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self._views[place].zero_()
                parameter.grad = self._views[place]
            else:
                self._adopt(place)

    def reduce(self) -> None:
        """Averages accumulated gradients outside of a backward pass."""
        self.prepare(synchronises=self._synchronises)  # zeros on a rank that had no pass
        self._all_reduce()
        self._finish()

    def _adopt(self, place: int) -> None:
        """Copies a gradient that is another tensor by now into its view of the buffer."""
        parameter, view = self._parameters[place], self._views[place]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad.detach())
            parameter.grad = view

    def _gradient_came(self, place: int | None) -> None:
        """Counts the gradient of a parameter, or (None) of the trigger."""
        if self._work is not None:
            raise RuntimeError(
                "a gradient of delay_all_reduce_named_params came while they were being averaged: "
                "a parameter is used in several parts that are recomputed in backward"
            )
        if place is None:
            self._triggered = True
        else:
            self._adopt(place)
            self._arrived.add(place)
        if not self._synchronises:
            return
        number = backward_number()
        if self._queued_in != number:
            self._queued_in = number
            call_after_backward(self._pass_ended)
        if self._triggered and len(self._arrived) == len(self._parameters):
            self._all_reduce()

    def _pass_ended(self) -> None:
        if self._work is None:
            if is_nested():
                return
            self._all_reduce()
        self._finish()

    def _all_reduce(self) -> None:
        self._buffer.div_(self.group.size())
        self._work = dist.all_reduce(self._buffer, group=self.group, async_op=True)

    def _finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._arrived.clear()
        self._triggered, self._queued_in = False, NO_BACKWARD

    def __getstate__(self) -> dict[str, Any]:
        # The buffer is laid out and the hooks are registered again by `attach`.
        return {"_parameters": self._parameters, "_trigger": self._trigger}
