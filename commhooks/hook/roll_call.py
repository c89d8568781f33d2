"""Waits until every rank has come to a call, and names the ranks that have not.

Ranks meet in the process group's store. Nothing is sent through the group, so a call to which some
ranks do not come leaves no collective behind: the ranks may call again.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_core import MissingRankError, group_store, group_timeout

__all__ = ["forget", "roll_call"]

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
    """
    store = group_store(group)
    if store is None or group.size() == 1:
        return
    longest = min(limit or timedelta.max, group_timeout(group) or limit or _DEFAULT)
    key = _next_key(group, store)
    store.set(f"{key}/{group.rank()}", call)
    # Whoever writes the outcome first decides for all ranks: the last rank may come while another
    # one gives up.
    if store.add(f"{key}/came", 1) == group.size():
        outcome = store.compare_set(f"{key}/outcome", "", _EVERYONE).decode()
    else:
        outcome = _wait(store, f"{key}/outcome", longest)
    if outcome is None:
        # Before the outcome is written: a rank that reads it may call again at once, and has to
        # find the new generation. Not ``add``: several ranks may give up, the last of them after
        # the first has called again.
        generation, _ = _calls[group]
        store.compare_set(_GENERATION, str(generation), str(generation + 1))
        text = _who_came(store, key, group.size(), longest)
        outcome = store.compare_set(f"{key}/outcome", "", text).decode()
    if outcome != _EVERYONE:
        raise MissingRankError(
            f"{call}: {outcome}. All ranks have to come here, between two steps; look at "
            f"the output of those that did not, which may have raised before they could"
        )


def forget(group: dist.ProcessGroup) -> None:
    """Removes the last call's keys from the store, after all ranks have passed."""
    # Else every handshake of a long job leaves keys in the memory of the store's process.
    store, (generation, number) = group_store(group), _calls.get(group, (0, 0))
    key = f"commhooks/{generation}/{number}"
    names = [f"{key}/{group.rank()}"]
    if group.rank() == 0:
        names += [f"{key}/came", f"{key}/outcome"]
    for name in names:
        with contextlib.suppress(Exception):  # a FileStore, say, may not delete keys
            store.delete_key(name)


def _next_key(group: dist.ProcessGroup, store: Any) -> str:
    # Ranks that gave up on a call have counted it, and a rank that never came has not: after that
    # their numbers differ, so numbers begin again in a new generation.
    generation = store.add(_GENERATION, 0)
    last = _calls.get(group, (0, 0))
    number = last[1] + 1 if last[0] == generation else 1
    _calls[group] = generation, number
    return f"commhooks/{generation}/{number}"


def _wait(store: Any, name: str, limit: timedelta) -> str | None:
    """Returns the value of a key once it is set, or None after ``limit``."""
    # Polls: the store's own ``wait`` keeps all other threads of the process from the store.
    end, pause = time.monotonic() + limit.total_seconds(), 1e-3
    while not store.check([name]):
        if time.monotonic() > end:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    text: str = store.get(name).decode()
    return text


def _who_came(store: Any, key: str, size: int, limit: timedelta) -> str:
    came = [rank for rank in range(size) if store.check([f"{key}/{rank}"])]
    missing = sorted(set(range(size)) - set(came))
    seconds = f"{limit.total_seconds():g} s"
    return f"not every rank came: {_ranks(missing)} did not within {seconds}, {_ranks(came)} did"


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" * (len(ranks) > 16))
    return f"rank{'s' * (len(ranks) != 1)} {listed}"
