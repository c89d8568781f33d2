"""Compares facts across ranks before a collective call: a mismatch is an error, not a hang."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commhooks.hook.roll_call import forget, roll_call
from ddp_core import MismatchError, MissingRankError

__all__ = ["MEETING", "handshake"]

# The longest wait in calls that all ranks reach at nearly the same time, since they come from a
# collective: ``register`` after DistributedDataParallel's constructor, ``switch`` after a step. In
# other calls ranks may meet for the first time, and the group's timeout holds.
MEETING = timedelta(minutes=5)


def handshake(
    call: str,
    facts: Mapping[str, Any],
    group: dist.ProcessGroup,
    limit: timedelta | None = None,
    *,
    tells: object = None,
) -> list[Any]:
    """Raises on every rank if the ranks' ``facts`` differ; all ranks of ``group`` call it.

    Args:
        call: the name of the public call, for the message.
        facts: values by field, compared for equality.
        limit: longest wait for the other ranks; the group's timeout if that is less, or if None.
        tells: what this rank tells the others besides; may differ.

    Returns:
        What each rank tells, in rank order.

    Raises:
        MismatchError: facts differ; names the first field, the ranks and the values.
        MissingRankError: some ranks did not come; names them.
    """
    # Before the gather: it names the missing ranks, and leaves no collective in the group.
    roll_call(call, group, limit)
    everyone: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(everyone, ({"call": call, **facts}, tells), group=group)
    except RuntimeError as error:
        raise MissingRankError(
            f"{call}: not every rank came, or one ended since; all ranks call {call}, "
            f"between two steps: {error}"
        ) from error
    forget(group)  # after the gather, which no rank passes before all have read the keys
    told = [one for _, one in everyone]
    everyone = [theirs for theirs, _ in everyone]
    # ``call`` is the first field: of ranks in different calls, nothing else is compared.
    for field in dict.fromkeys(field for theirs in everyone for field in theirs):
        values = [theirs.get(field) for theirs in everyone]
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        if odd:
            raise MismatchError(f"{call}: {_difference(field, values, odd[0])}")
    return told


def _difference(field: str, values: list[Any], odd: int) -> str:
    mine, theirs = values[0], values[odd]
    ranks = [rank for rank, value in enumerate(values) if value != mine]
    if isinstance(mine, list) and isinstance(theirs, list):
        for position in range(max(len(mine), len(theirs))):
            item = mine[position] if position < len(mine) else "nothing"
            other = theirs[position] if position < len(theirs) else "nothing"
            if item != other:
                return (
                    f"{field} differ between ranks at position {position}: rank 0 has {item}, "
                    f"rank {odd} has {other} (ranks that differ from rank 0: {ranks})"
                )
    verb = "differ" if " and " in field else "differs"
    return (
        f"{field} {verb} between ranks: rank 0 has {mine!r}, rank {odd} has {theirs!r} "
        f"(ranks that differ from rank 0: {ranks})"
    )
