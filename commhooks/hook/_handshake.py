"""Compares facts across ranks before a collective call: a mismatch is an error, not a hang."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_core import (
    MismatchError,
    MissingRankError,
    SharedStore,
    SilentStoreError,
    first_difference,
    group_timeout,
    shared_store,
)
from ddp_core.exchange._errors import ranks_in_words
from ddp_core.exchange._shared_store import MeetingPoint

__all__ = ["MEETING", "forget", "handshake", "roll_call"]


_EVERYONE = "everyone came"
_DEFAULT = timedelta(minutes=5)  # if neither the caller nor the group has a limit
_GENERATION = "commhooks/generation"

# By group: how often ranks have given up so far, and the number of calls since. Together they name
# a call, so they have to be the same on all ranks.
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = weakref.WeakKeyDictionary()


def roll_call(call: str, group: dist.ProcessGroup, limit: timedelta | None = None) -> None:
    """Returns on every rank of ``group`` once all have come, or raises on all that came.

    Does nothing on a group without a store, where a missing rank is a collective's timeout.

    Args:
        call: the name of the public call, for the message.
        limit: longest wait; the group's timeout if that is less, or if None.

    Raises:
        MissingRankError: some ranks did not come; the others get the same message.
        SilentStoreError: the process that holds the store does not answer.
    """
    store = shared_store(group)
    if store is None or group.size() == 1:
        return
    longest = min(limit or timedelta.max, group_timeout(group) or limit or _DEFAULT)
    seconds = longest.total_seconds()
    end = time.monotonic() + seconds
    try:
        point = _next_point(group, store, end)
        try:
            outcome = point.wait_for_all(_EVERYONE, end)
            if outcome is None:
                came, missing = map(ranks_in_words, point.who_came())
                text = f"not every rank came: {missing} did not within {seconds:g} s, {came} did"
                outcome = store.ask(_giving_up(group, point, text), 0.0)
        except SilentStoreError:
            # Read by the others once the store answers again; nobody waits for that.
            text = f"rank {point.rank} gave up: its store was silent"
            store.tell(_giving_up(group, point, text))
            raise
    except SilentStoreError as error:
        raise SilentStoreError(f"{call}: {error}") from error
    if outcome != _EVERYONE:
        raise MissingRankError(
            f"{call}: {outcome}. All ranks have to come here, between two steps; look at "
            f"the output of those that did not, which may have raised before they could"
        )


def forget(group: dist.ProcessGroup) -> None:
    """Removes the last call's keys from the store, after all ranks have passed."""
    if group in _calls and (store := shared_store(group)) is not None:
        _point(group, store).forget()


def _point(group: dist.ProcessGroup, store: SharedStore) -> MeetingPoint:
    """Returns where ranks meet in the last call."""
    generation, number = _calls[group]
    return MeetingPoint(store, f"commhooks/{generation}/{number}", group.rank(), group.size())


def _next_point(group: dist.ProcessGroup, store: SharedStore, end: float) -> MeetingPoint:
    # Ranks that gave up on a call have counted it, and a rank that never came has not: after that
    # their numbers differ, so numbers begin again in a new generation.
    generation = store.ask(lambda it: it.add(_GENERATION, 0), end - time.monotonic())
    last = _calls.get(group, (0, 0))
    number = last[1] + 1 if last[0] == generation else 1
    _calls[group] = generation, number
    return _point(group, store)


def _giving_up(group: dist.ProcessGroup, point: MeetingPoint, text: str) -> Callable[[Any], str]:
    """Ends a call to which not all ranks came, unless it has ended; returns its outcome."""
    generation, _ = _calls[group]

    def give_up(it: Any) -> str:
        # Before the outcome is written: a rank that reads it may call again at once, and has to
        # find the new generation. Not ``add``: several ranks may give up, the last of them after
        # the first has called again.
        it.compare_set(_GENERATION, str(generation), str(generation + 1))
        return point.decide(text)(it)

    return give_up


# ---- facts


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
