"""Tells the reducer that backward begins, before any parameter's gradient comes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ddp_core._torch import tree_flatten, tree_unflatten, will_run
from ddp_core.reducer.backward import Backward

__all__ = ["through_sink"]


class _Sink(torch.autograd.Function):
    """The identity; one node for all outputs, so that backward passes all of them or none."""

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
    """Returns ``output``; tensors with a graph behind them have passed through the sink.

    Args:
        step: is told when backward begins. A graph may outlive it.
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
