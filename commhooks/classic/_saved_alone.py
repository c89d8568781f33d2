"""A state that one rank saved alone, as torch's documentation does it, on all ranks.

What all ranks share is in it. The residuals of the other ranks are not, and the saver's must not
be applied in their place: the sum over ranks would count it several times.
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
    """Makes sure that what stands in for missing ranks is one state, and says what is lost.

    All ranks of ``group`` call it, each with the state it has loaded.

    Raises:
        CheckpointError: some ranks have loaded their own states and some another rank's.
    """
    common, parts = read(saved, verify=False)
    held = sorted(part.rank for part in parts)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (held, common["world_size"]), group=group)
    own = all(rank in present for rank, (present, _) in enumerate(everyone))
    if own and all(size == group.size() for _, size in everyone):
        return
    if any(one != everyone[0] for one in everyone):
        loaded = ", ".join(f"rank {rank} that of {one[0]}" for rank, one in enumerate(everyone))
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
