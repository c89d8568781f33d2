"""What happens around the forward pass of the module: before it computes, and after."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.nn.parallel.scatter_gather import scatter_kwargs

from ddp_core._torch import in_join, not_compiled
from ddp_core.ddp.parts import Parts
from ddp_core.ddp.sink import through_sink
from ddp_core.ddp.uneven import Plans, announce
from ddp_core.reducer.precision import Use

__all__ = ["ForwardPass", "before_forward", "not_traced"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def not_traced(*, recursive: bool) -> Callable[[_Method], _Method]:
    """Makes the compiler leave the method alone, and what it calls if ``recursive``."""
    decorator: Any = not_compiled(recursive=recursive)
    return decorator  # type: ignore[no-any-return]


class _Module(Protocol):
    """What is asked of a DistributedDataParallel at every pass: trainers may have set it."""

    device_ids: list[int] | None
    dim: int
    require_backward_grad_sync: bool
    _ddp_sink_clone: bool
    _join_config: Any


@not_traced(recursive=True)
def before_forward(
    parts: Parts, module: _Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], ForwardPass]:
    """Begins a forward pass; returns what the inner module gets, and the pass."""
    if module.device_ids:
        moved = scatter_kwargs(inputs, kwargs, [module.device_ids[0]], dim=module.dim)
        inputs, kwargs = moved[0][0], moved[1][0]
    under_way = ForwardPass(parts, module)
    return *under_way.begin(inputs, kwargs), under_way


class ForwardPass:
    """Does what comes before and after one forward pass of a DistributedDataParallel."""

    def __init__(self, parts: Parts, module: _Module) -> None:
        self._parts, self._module = parts, module
        # One that is run once more, for its activations, belongs to the step under way.
        self._is_recomputed = parts.reducer.is_recomputed()
        self._low: Use | None = None  # it uses low-precision parameters

    def begin(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Does what comes before the inner module computes; returns what that gets."""
        precision = self._parts.precision
        if not self._is_recomputed:
            self.begin_step(Plans(torch.is_grad_enabled(), self._synchronises()))
        if precision is None:
            return inputs, kwargs
        self._low = precision.begin_forward()
        if torch.is_grad_enabled() and not precision.is_watched:
            # The parameters' data are other tensors now, and their accumulators other nodes.
            precision.is_watched = True
            self._parts.reducer.accumulators.watch()
        return precision.cast_inputs(inputs), precision.cast_inputs(kwargs)

    def _synchronises(self) -> bool:
        """Whether a backward pass averages gradients."""
        return torch.is_grad_enabled() and self._module.require_backward_grad_sync

    def begin_step(self, plans: Plans) -> None:
        """Does what all ranks do alike; collectives have one order, see `ShadowHook`."""
        parts, reducer = self._parts, self._parts.reducer
        if plans.grads:
            parts.known.check()
        parts.find_optimizers()
        if reducer.backward.unreduced.holding:  # nothing travels, see `hold`
            if plans.grads:
                reducer.prepare_for_forward()
            return
        if plans.at_point:
            parts.buffers.sync_next = True  # whatever ran within `hold`
        if plans.grads or in_join(self._module) or parts.buffers.are_due:
            parts.before_collectives()
        work = announce(self._module, parts.replica, plans)
        if plans.grads:
            reducer.prepare_for_forward()
            if plans.sync:
                parts.hooks.follow_schedule()
                reducer.time_forward()
        if work is not None:  # after the step before was dropped, which would forget it
            static = parts.uneven.static_world_size
            reducer.set_effective_ranks(work, static_world_size=static)
        if parts.buffers.are_due_when(after_forward=False):
            self._synchronise_buffers(awaits=plans.sync)

    def broke_off(self) -> None:
        """Ends the pass after the inner module has raised."""
        if self._low is not None:
            self._low.end()

    @not_traced(recursive=True)
    def end(self, output: Any) -> Any:
        """Does what comes after the inner module has computed; returns what the caller gets."""
        if not self._is_recomputed:
            output = self._end_step(output)
        if self._low is not None:
            assert self._parts.precision is not None
            self._parts.precision.end_forward(self._low, output)
        return output

    def _end_step(self, output: Any) -> Any:
        sync = self._synchronises()
        parts, reducer = self._parts, self._parts.reducer
        self.end_step(sync=sync)
        if torch.is_grad_enabled():
            reducer.backward.unreduced.forward_synchronised = sync
        if sync:
            reducer.prepare_for_backward()
        if sync and reducer.usage.needs_sink:
            # Held weakly: the graph may live longer than the model, and is no reason to keep it.
            clones = self._module._ddp_sink_clone
            output = through_sink(output, weakref.ref(reducer.backward), clone=clones)
        if parts.delayed is not None and torch.is_grad_enabled():
            parts.delayed.prepare(synchronises=sync)
        return output

    def end_step(self, *, sync: bool) -> None:
        """Does what all ranks do alike after the module has computed."""
        buffers = self._parts.buffers
        if self._parts.reducer.backward.unreduced.holding:
            return
        if buffers.are_due_when(after_forward=True):
            self._synchronise_buffers(awaits=sync)
        buffers.sync_next = sync

    def _synchronise_buffers(self, *, awaits: bool) -> None:
        joins = in_join(self._module)
        self._parts.synchronise_buffers(joins=joins, awaits=awaits)
