"""Ranks agree, after a backward pass that raised, that all of them have dropped the same step.

Buckets carry no number: those of a rank that goes on to its next step would be averaged with what
the others have sent, or will send, in the step that it has dropped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_core.exchange.errors import MismatchError
from ddp_core.exchange.lane_groups import group_timeout

__all__ = ["Abandonments"]

_ALIKE = "all ranks alike"
_DEFAULT = timedelta(minutes=5)  # if the group has no limit
_LISTED = 16


class _Dropped(NamedTuple):
    """How far a rank came with a step that it has dropped."""

    step: int  # since the ranks are together
    launched: int  # buckets
    told: bool  # by another rank, that it has failed


class Abandonments:
    """Compares, through the process group's store, the steps that ranks have dropped.

    Not by a collective: the ranks that did not raise are in another one. All of a rank's dropped
    steps are counted; ranks that drop alike count alike, and leave the keys of two of them in the
    store.

    Args:
        group: the ranks.
        store: what they share, if anything.
        name: distinguishes reducers of one group; the same on all ranks.

    Attributes:
        first_step: the one with which these ranks began. A rank that came to them counts from 0.
    """

    def __init__(self, group: dist.ProcessGroup, store: Any, name: str) -> None:
        self._group, self._store, self._name = group, store, name
        self._rank, self._size = group.rank(), group.size()
        self.first_step = 0
        self._number = 0  # of the dropped step that comes next, or is not agreed on yet
        self._mine: _Dropped | None = None
        self._error = ""  # the ranks did not drop the same: for good

    def note(self, step: int, launched: int, *, told: bool) -> None:
        """Hears that this rank has dropped a step; tells nobody yet.

        Args:
            launched: number of buckets whose exchange has begun.
            told: whether it raised because another rank had failed.
        """
        if self._size > 1:
            self._mine = _Dropped(step - self.first_step, launched, told)

    def agree(self) -> None:
        """Waits until all ranks have dropped the step that this one has, if it has any.

        Ranks come here before their next collective.

        Raises:
            MismatchError: a rank has not, or after another number of buckets.
        """
        if self._mine is None:
            return
        if not self._error:
            try:
                outcome = self._outcome(self._mine)
            except RuntimeError as error:
                outcome = f"{self._text(self._mine)}, and the store failed: {error}"
            if outcome == _ALIKE:
                self._forget(self._number - 1)
                self._number, self._mine = self._number + 1, None
                return
            self._error = outcome
        raise MismatchError(
            f"DistributedDataParallel: a backward pass raised, and not at the same place on all "
            f"ranks: {self._error}. Gradients of different layers or steps would be averaged. End "
            f"all processes and resume from the last checkpoint; to go on after an error in "
            f"backward, let all ranks raise and catch it at the same place"
        )

    def look(self, step: int, bucket: int) -> str | None:
        """Returns what is wrong if another rank has dropped what this one waits for.

        Args:
            step, bucket: what this rank waits for.
        """
        if self._store is None or self._size == 1:
            return None
        with contextlib.suppress(RuntimeError):  # the store's host may be gone
            if not self._store.check([self._key()]):
                return None
            who, theirs = _parse(self._store.get(self._key()))
            outcome = self._decided()
            if outcome is None and self._mine is not None:
                # What it has launched is settled here, and comes if all have launched as much.
                if theirs != self._mine:
                    outcome = self._differ(who, theirs, self._mine)
            elif outcome is None and theirs[:2] <= (step - self.first_step, bucket):
                mine = f"bucket {bucket} of step {step}" if bucket >= 0 else f"ranks in step {step}"
                text = f"{self._text(theirs, who)}, rank {self._rank} waits for {mine}"
                outcome = self._decide(text)
            if outcome is not None and outcome != _ALIKE:
                self._error = outcome
                return outcome
        return None

    def _outcome(self, mine: _Dropped) -> str:
        """Tells the others; returns what all ranks then know. Whoever decides first does so."""
        store, key = self._store, self._key()
        if store is None:
            return f"{self._text(mine)}, and the group has no store to ask the others"
        text = f"{self._rank} {mine.step} {mine.launched} {int(mine.told)}"
        who, first = _parse(store.compare_set(key, "", text))
        if first != mine:
            return self._differ(who, first, mine)
        store.set(f"{key}/{self._rank}", "")
        if store.add(f"{key}/came", 1) == self._size:
            return self._decide(_ALIKE)
        limit = group_timeout(self._group) or _DEFAULT
        outcome = self._wait(limit)
        if outcome is not None:
            return outcome
        came = [rank for rank in range(self._size) if store.check([f"{key}/{rank}"])]
        missing = [rank for rank in range(self._size) if rank not in came]
        return self._decide(
            f"{self._text(mine, *came)}, {_ranks(missing)} did not within "
            f"{limit.total_seconds():g} s"
        )

    def _differ(self, who: int, theirs: _Dropped, mine: _Dropped) -> str:
        return self._decide(f"{self._text(theirs, who)}, {self._text(mine)}")

    def _text(self, dropped: _Dropped, *who: int) -> str:
        """Says what ranks have dropped; this one by default."""
        how = "heard of another rank's failure in" if dropped.told else "dropped"
        step, buckets = dropped.step + self.first_step, dropped.launched
        return f"{_ranks(who or [self._rank])} {how} step {step} after {buckets} buckets"

    def _wait(self, limit: timedelta) -> str | None:
        # Polls: the store's own ``wait`` keeps all other threads of the process from the store.
        end, pause = time.monotonic() + limit.total_seconds(), 1e-3
        while (outcome := self._decided()) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return outcome

    def _decided(self) -> str | None:
        key = f"{self._key()}/outcome"
        if not self._store.check([key]):
            return None
        text: str = self._store.get(key).decode()
        return text

    def _decide(self, outcome: str) -> str:
        text: str = self._store.compare_set(f"{self._key()}/outcome", "", outcome).decode()
        return text

    def _key(self) -> str:
        return f"ddp_core/{self._name}/abandoned/{self._number}"

    def _forget(self, number: int) -> None:
        """Removes the keys of an earlier step: all ranks have passed it, and nobody looks there."""
        key = f"ddp_core/{self._name}/abandoned/{number}"
        names = [f"{key}/{self._rank}"]
        if self._rank == 0:
            names += [key, f"{key}/came", f"{key}/outcome"]
        for name in names if number >= 0 else ():
            with contextlib.suppress(Exception):  # a store may not delete keys
                self._store.delete_key(name)


def _parse(value: bytes) -> tuple[int, _Dropped]:
    rank, step, launched, told = map(int, value.split())
    return rank, _Dropped(step, launched, bool(told))


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_LISTED]))
    more = f" and {len(ranks) - _LISTED} more" * (len(ranks) > _LISTED)
    return f"rank{'s' * (len(ranks) != 1)} {listed}{more}"
