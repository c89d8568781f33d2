"""Compares across ranks what they are about to do: a mismatch is an error, not a hang."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commhooks.hook.roll_call import forget, roll_call
from ddp_core import MismatchError, MissingRankError

__all__ = ["MEETING", "handshake"]

# The longest wait where all ranks come from a collective: DistributedDataParallel's constructor,
# or the step before. A first step or a constructor may be the first meeting of slow starters.
MEETING = timedelta(minutes=5)


def handshake(
    call: str,
    facts: Mapping[str, Any],
    group: dist.ProcessGroup,
    limit: timedelta | None = None,
) -> None:
    """Raises on every rank if the ranks' ``facts`` differ; all ranks of ``group`` call it.

    Args:
        call: what is being agreed on, for the message.
        facts: by field; compared for equality.
        limit: longest wait for the other ranks; the group's timeout if that is less, or if None.

    Raises:
        MismatchError: names the first field that differs and the ranks and values.
        MissingRankError: names the ranks that did not come.
    """
    roll_call(call, group, limit)
    everyone: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(everyone, {"call": call, **facts}, group=group)
    except RuntimeError as error:
        raise MissingRankError(
            f"{call}: not every rank came, or one ended since; all ranks call {call} alike, "
            f"between two steps: {error}"
        ) from error
    forget(group)
    for field in dict.fromkeys(field for theirs in everyone for field in theirs):
        values = [theirs.get(field) for theirs in everyone]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise MismatchError(f"{call}: {_difference(field, values, odd[0])}")


def _difference(field: str, values: list[Any], odd: int) -> str:
    mine, theirs = values[0], values[odd]
    ranks = [rank for rank, value in enumerate(values) if value != mine]
    if isinstance(mine, list) and isinstance(theirs, list):
        for position in range(max(len(mine), len(theirs))):
            left = mine[position] if position < len(mine) else "nothing"
            right = theirs[position] if position < len(theirs) else "nothing"
            if left != right:
                return (
                    f"{field} differ between ranks at position {position}: rank 0 has {left}, "
                    f"rank {odd} has {right} (ranks that differ from rank 0: {ranks})"
                )
    return (
        f"{field} differs between ranks: rank 0 has {mine!r}, rank {odd} has {theirs!r} "
        f"(ranks that differ from rank 0: {ranks})"
    )
