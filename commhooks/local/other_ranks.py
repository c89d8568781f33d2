"""Makes what DiLoCo keeps equal on ranks that have changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.local.fragments import Fragment

__all__ = ["share"]


def share(
    fragments: Sequence[Fragment], counts: Sequence[int], source: int, group: dist.ProcessGroup
) -> list[int]:
    """Takes outer parameters and momenta of rank ``source``; all ranks of ``group`` call it.

    Returns:
        The counts of that rank.
    """
    device = fragments[0].outer[0].device
    numbers = torch.tensor(list(counts), dtype=torch.int64, device=device)
    dist.broadcast(numbers, group=group, group_src=source)
    for fragment in fragments:
        for value in (*fragment.outer, *fragment.momentum):
            real = torch.view_as_real(value) if value.is_complex() else value
            dist.broadcast(real, group=group, group_src=source)
    return [int(number) for number in numbers.tolist()]
