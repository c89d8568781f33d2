"""Makes what DiLoCo keeps equal on ranks that have changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.hook import GroupChange, HookState
from commhooks.local.fragments import Fragment

__all__ = ["STAYS", "move", "share"]

STAYS = "it belongs to DiLoCo, which has parameters to share, too: call change_group of that"


def move(hook: HookState, group: dist.ProcessGroup) -> GroupChange:
    """Moves the hook of a DiLoCo, which does not move when it is told by itself."""
    hook.stays = ""
    try:
        return hook.change_group(group)
    finally:
        hook.stays = STAYS


def share(
    fragments: Sequence[Fragment],
    counts: Sequence[int],
    change: GroupChange,
    group: dist.ProcessGroup,
) -> list[int]:
    """Takes outer parameters and momenta of one rank; all ranks of ``group`` call it.

    A rank that joins begins with these parameters.

    Returns:
        The counts of that rank.
    """
    device = fragments[0].outer[0].device
    numbers = torch.tensor(list(counts), dtype=torch.int64, device=device)
    dist.broadcast(numbers, group=group, group_src=change.source)
    for fragment in fragments:
        for value in (*fragment.outer, *fragment.momentum):
            real = torch.view_as_real(value) if value.is_complex() else value
            dist.broadcast(real, group=group, group_src=change.source)
        if group.rank() in change.joined:
            fragment.restore()
    return [int(number) for number in numbers.tolist()]
