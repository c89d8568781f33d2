"""Compares facts across ranks before a collective call: a mismatch is an error, not a hang."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commhooks.hook.roll_call import forget, roll_call
from ddp_core import MismatchError, MissingRankError, first_difference

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
    text = first_difference(everyone)
    if text is not None:
        raise MismatchError(f"{call}: {text}")
    return told
