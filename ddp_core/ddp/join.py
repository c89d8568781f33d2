"""Uneven inputs: a rank that has none left takes part in the others' collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from ddp_core.ddp.ddp import DistributedDataParallel

__all__ = ["Plans", "ShadowHook", "common_rank", "tell_joined_ranks"]


class ShadowHook(JoinHook):
    """Does what a forward and a backward pass of the others expects of this rank."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        """One step of the others."""
        ddp = self._ddp
        plans = hear_of_plans(ddp.process_group, ddp.device)
        if plans.grads:
            ddp.reducer.prepare_for_forward()
        if plans.sync:
            ddp._hooks.follow_schedule(ddp)
        for after_forward in (False, True):
            if ddp._synchronises_buffers(after_forward=after_forward):
                ddp._synchronise_buffers(backward_follows=plans.sync, candidate=False)
        ddp.require_forward_param_sync = plans.sync
        if plans.sync:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """At the end all ranks take the model of one that trained last."""
        self._ddp._take_model_of(is_last_joiner)


class Plans(NamedTuple):
    """What the ranks with inputs do in this forward pass, all alike."""

    grads: bool  # it records a graph
    sync: bool  # its backward pass averages gradients


def tell_joined_ranks(group: dist.ProcessGroup, device: torch.device, plans: Plans) -> None:
    """Lets ranks without inputs know; all ranks with inputs call it in forward."""
    flags = torch.tensor(plans, dtype=torch.float32, device=device)
    dist.all_reduce(flags, group=group, async_op=True)


def hear_of_plans(group: dist.ProcessGroup, device: torch.device) -> Plans:
    """What the others plan; a rank without inputs calls it where they tell."""
    flags = torch.zeros(len(Plans._fields), device=device)
    dist.all_reduce(flags, group=group)
    return Plans(*(bool(flag) for flag in flags.tolist()))


def common_rank(group: dist.ProcessGroup, device: torch.device, *, candidate: bool) -> int:
    """The largest rank that is a candidate, the same answer on all ranks.

    Raises:
        RuntimeError: there is no candidate.
    """
    choice = torch.tensor([group.rank() if candidate else -1], device=device)
    dist.all_reduce(choice, dist.ReduceOp.MAX, group=group)
    if choice.item() < 0:
        raise RuntimeError("DistributedDataParallel.join: no rank has a model to share")
    return int(choice.item())
