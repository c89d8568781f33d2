"""Checks states that one rank saved and all ranks load, as torch's documentation recommends.

Such a state has what all ranks share. It lacks the residuals of the other ranks, which cannot be
replaced by the saved one: its sum over ranks would be sent several times.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from commhooks.checkpoint.form import read
from commhooks.errors import CheckpointError
from commhooks.wrappers.feedback import RESIDUAL

__all__ = ["agree_on_parts"]

Saved = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def agree_on_parts(saved: Saved, group: dist.ProcessGroup) -> None:
    """Checks that ranks without a part of their own have loaded the same state; warns of losses.

    All ranks of ``group`` call this.

    Args:
        saved: the state that this rank has loaded.
        group: the ranks that continue.

    Raises:
        CheckpointError: some ranks have loaded their own states, and some another rank's.
    """
    common, parts = read(saved, verify=False)
    held = sorted(part.rank for part in parts)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (held, common["world_size"]), group=group)
    # The usual case: each rank has its own part, of a run with as many ranks.
    has_own_part = all(rank in present for rank, (present, _) in enumerate(everyone))
    if has_own_part and all(size == group.size() for _, size in everyone):
        return
    # Otherwise all ranks have to hold the same state: a mixture would lose the residuals of some
    # ranks without a warning.
    if any(entry != everyone[0] for entry in everyone):
        loaded = ", ".join(
            f"rank {rank} that of {present}" for rank, (present, _) in enumerate(everyone)
        )
        raise CheckpointError(
            f"PowerSGDState: the ranks have loaded different states ({loaded}). Residuals differ "
            f"per rank: every rank loads its own file, or all the same one"
        )
    size = common["world_size"]
    missing = sorted(set(range(size)) - set(held))
    residual = parts[0].memory.get(RESIDUAL, {})
    if group.rank() == 0 and missing and any(bool(value.any()) for value in residual.values()):
        warnings.warn(
            f"PowerSGDState: the state loaded was saved by rank {held[0]} of {size} alone. It "
            f"lacks the residuals of ranks {missing}, what error feedback had still to send of "
            f"their gradients; they go on with zero. To keep them, all ranks call "
            f"state.gathered(), and one saves what that returns",
            RuntimeWarning,
            stacklevel=2,
        )
