"""Runs what surrounds a module's forward pass: buffers, collectives, and preparing backward."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel.scatter_gather import scatter_kwargs

from ddp_core._torch import dynamo_disable, in_join, tree_flatten, tree_unflatten, will_run
from ddp_core.ddp._ddp_state import DDPState
from ddp_core.ddp._replica import JoinFlags, recv_join_flags, send_join_flags
from ddp_core.reducer._backward import Backward
from ddp_core.reducer._precision import Use

__all__ = ["ForwardPass", "ShadowHook", "before_forward", "through_sink"]


class _Module(Protocol):
    """Declares what every pass reads from a DistributedDataParallel; trainers may set these."""

    device_ids: list[int] | None
    dim: int
    require_backward_grad_sync: bool
    _ddp_sink_clone: bool
    _join_config: Any


@dynamo_disable
def before_forward(
    state: DDPState, module: _Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], ForwardPass]:
    """Begins a forward pass; returns what the inner module gets, and the pass."""
    if module.device_ids:
        moved = scatter_kwargs(inputs, kwargs, [module.device_ids[0]], dim=module.dim)
        inputs, kwargs = moved[0][0], moved[1][0]
    under_way = ForwardPass(state, module)
    return *under_way.begin(inputs, kwargs), under_way


class ForwardPass:
    """Prepares and ends one forward pass of a DistributedDataParallel."""

    def __init__(self, state: DDPState, module: _Module) -> None:
        self._ddp_state, self._module = state, module
        # A pass that runs again, for its activations, belongs to the step under way.
        self._is_recomputed = state.reducer.is_recomputed()
        self._low: Use | None = None  # it uses low-precision parameters

    def begin(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepares the pass; returns the arguments of the inner module."""
        precision = self._ddp_state.precision
        if not self._is_recomputed:
            self.begin_step(JoinFlags(torch.is_grad_enabled(), self._synchronises()))
        if precision is None:
            return inputs, kwargs
        self._low = precision.begin_forward()
        if torch.is_grad_enabled() and not precision.is_watched:
            # The parameters' data are other tensors now, and their accumulators other nodes.
            precision.is_watched = True
            self._ddp_state.reducer.accumulators.watch()
        return precision.cast_inputs(inputs), precision.cast_inputs(kwargs)

    def _synchronises(self) -> bool:
        """Whether a backward pass averages gradients."""
        return torch.is_grad_enabled() and self._module.require_backward_grad_sync

    def begin_step(self, plans: JoinFlags) -> None:
        """Issues the collectives before forward, in the order that `ShadowHook` repeats."""
        state, reducer = self._ddp_state, self._ddp_state.reducer
        if plans.grads:
            state.known.check()
        state.find_optimizers()
        if reducer.backward.unreduced.in_hold:  # nothing travels, see `hold`
            if plans.grads:
                reducer.prepare_for_forward()
            return
        if plans.at_point:
            state.buffers.sync_next = True  # whatever ran within `hold`
        if plans.grads or in_join(self._module) or state.buffers.are_due:
            state.before_collectives()
        work = send_join_flags(self._module, state.replica, plans)
        if plans.grads:
            reducer.prepare_for_forward()
            if plans.sync:
                state.hooks.follow_schedule()
                reducer.time_forward()
        if work is not None:  # after the step before was dropped, which would forget it
            static = state.uneven.static_world_size
            reducer.set_effective_ranks(work, static_world_size=static)
        if state.buffers.are_due_when(after_forward=False):
            self._synchronise_buffers(awaits=plans.sync)

    def broke_off(self) -> None:
        """Ends the pass after the inner module has raised."""
        if self._low is not None:
            self._low.end()

    @dynamo_disable
    def end(self, output: Any) -> Any:
        """Ends the pass once the inner module has computed; returns what the caller gets."""
        if not self._is_recomputed:
            output = self._end_step(output)
        if self._low is not None:
            assert self._ddp_state.precision is not None
            self._ddp_state.precision.end_forward(self._low, output)
        return output

    def _end_step(self, output: Any) -> Any:
        sync = self._synchronises()
        state, reducer = self._ddp_state, self._ddp_state.reducer
        self.end_step(sync=sync)
        if torch.is_grad_enabled():
            reducer.backward.unreduced.forward_synchronised = sync
        if sync:
            reducer.prepare_for_backward()
        if sync and reducer.usage.needs_sink:
            # Held weakly: the graph may live longer than the model, and is no reason to keep it.
            clones = self._module._ddp_sink_clone
            output = through_sink(output, weakref.ref(reducer.backward), clone=clones)
        if state.delayed is not None and torch.is_grad_enabled():
            state.delayed.prepare(synchronises=sync)
        return output

    def end_step(self, *, sync: bool) -> None:
        """Issues the collectives after forward, on all ranks alike."""
        buffers = self._ddp_state.buffers
        if self._ddp_state.reducer.backward.unreduced.in_hold:
            return
        if buffers.are_due_when(after_forward=True):
            self._synchronise_buffers(awaits=sync)
        buffers.sync_next = sync

    def _synchronise_buffers(self, *, awaits: bool) -> None:
        joins = in_join(self._module)
        self._ddp_state.synchronise_buffers(joins=joins, awaits=awaits)


# ---- the end of the graph


class _Sink(torch.autograd.Function):
    """Returns its inputs, as one node for all outputs: backward reaches all of them or none."""

    @staticmethod
    def forward(
        ctx: Any, step: weakref.ref[Backward], clone: bool, probe: Tensor, *outputs: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)  # an output that the loss does not use has no gradient
        ctx.step = step
        with torch.enable_grad():
            ctx.probe = probe.view_as(probe).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        # Without a clone the outputs would be views, which may not be changed in place.
        return tuple(output.clone() for output in outputs) if clone else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        step = ctx.step()
        # A pass that was asked for certain gradients only (torch.autograd.grad, `inputs=`) leaves
        # the probe out. It may come to no parameter at all, and then it is not a step's.
        if step is not None and will_run(ctx.probe):
            step.begins()
        return (None, None, None, *grads)


def through_sink(output: Any, step: weakref.ref[Backward], *, clone: bool) -> Any:
    """Returns ``output``, with all tensors that have a graph passed through the sink.

    Args:
        step: notified when backward begins. A graph may outlive it.
        clone: whether the outputs are copies.
    """
    leaves, spec = tree_flatten(output)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    if not places:
        return output
    probe = torch.empty(0, dtype=torch.float32, device=leaves[places[0]].device, requires_grad=True)
    passed = _Sink.apply(step, clone, probe, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, passed, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, spec)


# ---- torch's Join


class ShadowHook(JoinHook):
    """Takes part in the collectives of the other ranks' passes once this rank has no more inputs.

    Args:
        static_world_size: gradients are divided by the number of all ranks; else by the number of
            those that have inputs.

    Raises:
        RuntimeError: a rank without inputs would keep the others waiting.
    """

    def __init__(self, state: DDPState, *, static_world_size: bool) -> None:
        if state.uneven.needs_all:
            raise RuntimeError(
                "DistributedDataParallel.join: the optimizer steps in shards while gradients are "
                "averaged (ZeroOptimizer), for which all ranks need inputs. Give all ranks as many "
                "inputs, or use an optimizer of each rank's own"
            )
        if state.delayed is not None:
            raise RuntimeError(
                "DistributedDataParallel.join: a rank without inputs does not take part in the "
                "delayed all-reduce of delay_all_reduce_named_params. Give all ranks as many "
                "inputs, or construct it without that argument"
            )
        state.uneven.static_world_size = static_world_size
        state.uneven.has_joined = True
        self._ddp_state = state
        super().__init__()

    def main_hook(self) -> None:
        """Takes part in the collectives of one step of the other ranks."""
        state, buffers = self._ddp_state, self._ddp_state.buffers
        state.before_collectives()
        plans = recv_join_flags(state.replica)
        if plans.grads:
            state.reducer.prepare_for_forward()
        if plans.sync:
            state.hooks.follow_schedule()
        if plans.at_point:
            buffers.sync_next = True
        for after_forward in (False, True):
            if buffers.are_due_when(after_forward=after_forward):
                # Within `join` the source is agreed on: this rank's buffers are old.
                state.synchronise_buffers(joins=True, candidate=False, awaits=plans.sync)
        buffers.sync_next = plans.sync
        if plans.sync:
            state.reducer.shadow(at_point=plans.at_point)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Receives, as all ranks do, the model of a rank that trained last."""
        self._ddp_state.broadcast_model(candidate=is_last_joiner)
