"""What ranks tell each other where some may have run out of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from ddp_core._torch import in_join
from ddp_core.ddp.replica import Replica

__all__ = ["Plans", "UnevenInputs", "announce", "common_rank", "hear_of_plans"]


@dataclass
class UnevenInputs:
    """Says how a module takes part in ``join``."""

    has_joined: bool = False  # ranks may have run out of inputs
    static_world_size: bool = True  # gradients are divided by the number of all ranks
    needs_all: bool = False  # an optimizer steps with the hook, in shards of all ranks


class Plans(NamedTuple):
    """Says what the ranks with inputs do in this forward pass, all alike."""

    grads: bool  # it records a graph
    sync: bool  # its backward pass averages gradients
    at_point: bool = False  # it is no pass but `reduce`


def announce(joinable: Any, replica: Replica, plans: Plans) -> dist.Work | None:
    """Lets ranks without inputs know; all ranks with inputs call it in forward.

    Args:
        joinable: the module, as :class:`torch.distributed.algorithms.join.Join` knows it.

    Returns:
        Work that counts the ranks with inputs, within ``join``.
    """
    work: dist.Work | None = Join.notify_join_context(joinable)
    if in_join(joinable):
        flags = torch.tensor(plans, dtype=torch.float32, device=replica.device)
        dist.all_reduce(flags, group=replica.group, async_op=True)
    return work


def hear_of_plans(replica: Replica) -> Plans:
    """Returns what the others plan; a rank without inputs calls it where they announce."""
    flags = torch.zeros(len(Plans._fields), dtype=torch.float32, device=replica.device)
    dist.all_reduce(flags, group=replica.group)
    return Plans(*(bool(flag) for flag in flags.tolist()))


def common_rank(replica: Replica, *, candidate: bool) -> int:
    """Returns the largest rank that is a candidate, the same answer on all ranks.

    Raises:
        RuntimeError: there is no candidate.
    """
    group = replica.group
    choice = torch.tensor([group.rank() if candidate else -1], device=replica.device)
    dist.all_reduce(choice, dist.ReduceOp.MAX, group=group)
    if choice.item() < 0:
        raise RuntimeError("DistributedDataParallel.join: no rank has a model to share")
    return int(choice.item())
