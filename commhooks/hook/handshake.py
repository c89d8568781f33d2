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
        key = _next_key(group, store, end)
        try:
            outcome = _outcome(call, group, store, key, end, seconds)
        except SilentStoreError:
            # Read by the others once the store answers again; nobody waits for that.
            store.tell(_giving_up(group, key, f"rank {group.rank()} gave up: its store was silent"))
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
    # Else every handshake of a long job leaves keys in the memory of the store's process.
    store, (generation, number) = shared_store(group), _calls.get(group, (0, 0))
    key = f"commhooks/{generation}/{number}"
    names = [f"{key}/{group.rank()}"]
    if group.rank() == 0:
        names += [f"{key}/came", f"{key}/outcome"]
    if store is not None:  # some stores do not delete keys: that is no error
        store.tell(lambda it: [it.delete_key(name) for name in names])


def _next_key(group: dist.ProcessGroup, store: SharedStore, end: float) -> str:
    # Ranks that gave up on a call have counted it, and a rank that never came has not: after that
    # their numbers differ, so numbers begin again in a new generation.
    generation = store.ask(lambda it: it.add(_GENERATION, 0), end - time.monotonic())
    last = _calls.get(group, (0, 0))
    number = last[1] + 1 if last[0] == generation else 1
    _calls[group] = generation, number
    return f"commhooks/{generation}/{number}"


def _outcome(
    call: str, group: dist.ProcessGroup, store: SharedStore, key: str, end: float, seconds: float
) -> str:
    """Comes, and returns what was decided: whoever writes the outcome first decides for all ranks.

    The last rank may come while another one gives up.
    """
    size = group.size()

    def come(it: Any) -> str:
        it.set(f"{key}/{group.rank()}", call)
        if it.add(f"{key}/came", 1) == size:
            return str(it.compare_set(f"{key}/outcome", "", _EVERYONE).decode())
        return ""

    outcome = store.ask(come, end - time.monotonic()) or _wait(store, f"{key}/outcome", end)
    if outcome is not None:
        return outcome
    limit = f"{seconds:g} s"
    ranks = range(size)
    came = store.ask(lambda it: [one for one in ranks if it.check([f"{key}/{one}"])], 0.0)
    return store.ask(_giving_up(group, key, _who_came(came, size, limit)), 0.0)


def _wait(store: SharedStore, key: str, end: float) -> str | None:
    return store.wait_for(key, end - time.monotonic())


def _giving_up(group: dist.ProcessGroup, key: str, text: str) -> Callable[[Any], str]:
    """Ends a call to which not all ranks came, unless it has ended; returns its outcome."""
    generation, _ = _calls[group]

    def give_up(it: Any) -> str:
        # Before the outcome is written: a rank that reads it may call again at once, and has to
        # find the new generation. Not ``add``: several ranks may give up, the last of them after
        # the first has called again.
        it.compare_set(_GENERATION, str(generation), str(generation + 1))
        return str(it.compare_set(f"{key}/outcome", "", text).decode())

    return give_up


def _who_came(came: list[int], size: int, limit: str) -> str:
    missing = sorted(set(range(size)) - set(came))
    return f"not every rank came: {_ranks(missing)} did not within {limit}, {_ranks(came)} did"


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" * (len(ranks) > 16))
    return f"rank{'s' * (len(ranks) != 1)} {listed}"


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
