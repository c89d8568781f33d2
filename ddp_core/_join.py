"""Uneven inputs: a rank that has none left takes part in the others' collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from ddp_core._ddp import DistributedDataParallel

__all__ = ["ShadowHook", "anybody_synchronises", "common_rank"]


class ShadowHook(JoinHook):
    """Does what a forward and a backward pass of the others expects of this rank."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        """One step of the others."""
        ddp = self._ddp
        ddp.reducer.rebuild()
        if ddp._synchronises_buffers(after_forward=False):
            ddp._synchronise_buffers(candidate=False)
        sync = anybody_synchronises(ddp.process_group, ddp.device, wait=True, mine=False)
        ddp.require_forward_param_sync = sync
        if not sync:
            return
        ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """At the end all ranks take the model of one that trained last."""
        self._ddp._take_model_of(is_last_joiner)


def anybody_synchronises(
    group: dist.ProcessGroup, device: torch.device, *, wait: bool, mine: bool
) -> bool:
    """Whether a rank's next backward pass averages gradients; all ranks call it in forward.

    Args:
        wait: for the answer, which only ranks without input need.
        mine: whether this rank's does.
    """
    flag = torch.full((1,), float(mine), device=device)
    work = dist.all_reduce(flag, group=group, async_op=True)
    if not wait:
        return mine
    work.wait()
    return bool(flag.item())


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
