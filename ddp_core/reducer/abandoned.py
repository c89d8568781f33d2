"""Ranks agree, after a backward pass that raised, that all of them have dropped the same step.

Buckets carry no number: those of a rank that goes on to its next step would be averaged with what
the others have sent, or will send, in the step that it has dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_core.exchange.errors import MismatchError
from ddp_core.exchange.shared_store import SharedStore, group_limit

__all__ = ["Abandonments"]

_ALIKE = "all ranks alike"
_LISTED = 16
_SOON = 1.0  # seconds in which a store answers


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
        store: asks what they share, if anything.
        name: distinguishes reducers of one group; the same on all ranks.

    Attributes:
        first_step: the one with which these ranks began. A rank that came to them counts from 0.
    """

    def __init__(self, group: dist.ProcessGroup, store: SharedStore | None, name: str) -> None:
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
                outcome = f"{self._text(self._mine)}, and {error}"
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
        # What this rank waits for has a timeout of its own, so a silent store is not waited for.
        seen = self._store.peek(self._seen(), _SOON)
        if not seen:
            return None
        (who, theirs), outcome = seen
        said = ""
        if outcome is None and self._mine is not None:
            # What it has launched is settled here, and comes if all have launched as much.
            if theirs != self._mine:
                said = self._difference(who, theirs, self._mine)
        elif outcome is None and theirs[:2] <= (step - self.first_step, bucket):
            mine = f"bucket {bucket} of step {step}" if bucket >= 0 else f"ranks in step {step}"
            said = f"{self._text(theirs, who)}, rank {self._rank} waits for {mine}"
        if said:
            outcome = self._store.peek(self._decision(said), _SOON)
        if outcome is None or outcome == _ALIKE:
            return None
        self._error = outcome
        return outcome

    def _seen(self) -> Callable[[Any], tuple[tuple[int, _Dropped], str | None] | None]:
        """Asks what the first rank has dropped, and what was decided."""
        key = self._key()

        def seen(store: Any) -> tuple[tuple[int, _Dropped], str | None] | None:
            if not store.check([key]):
                return None
            first = _parse(store.get(key))
            decided = store.check([f"{key}/outcome"])
            return first, store.get(f"{key}/outcome").decode() if decided else None

        return seen

    def _decision(self, outcome: str) -> Callable[[Any], str]:
        """Decides for all ranks, unless another one has: returns what was decided."""
        key = f"{self._key()}/outcome"
        return lambda store: str(store.compare_set(key, "", outcome).decode())

    def _outcome(self, mine: _Dropped) -> str:
        """Tells the others; returns what all ranks then know. Whoever decides first does so."""
        store, key, rank = self._store, self._key(), self._rank
        if store is None:
            return f"{self._text(mine)}, and the group has no store to ask the others"
        limit = group_limit(self._group)
        end = time.monotonic() + limit

        def decide(outcome: str) -> str:
            return store.ask(self._decision(outcome), end - time.monotonic())

        text = f"{rank} {mine.step} {mine.launched} {int(mine.told)}"
        first = store.ask(lambda it: it.compare_set(key, "", text), limit)
        who, theirs = _parse(first)
        if theirs != mine:
            return decide(self._difference(who, theirs, mine))

        def come(it: Any) -> bool:
            it.set(f"{key}/{rank}", "")
            return bool(it.add(f"{key}/came", 1) == self._size)

        if store.ask(come, end - time.monotonic()):
            return decide(_ALIKE)
        outcome = store.wait_for(f"{key}/outcome", end - time.monotonic())
        if outcome is not None:
            return outcome
        ranks = range(self._size)
        came = store.ask(lambda it: [one for one in ranks if it.check([f"{key}/{one}"])], 0.0)
        missing = [one for one in ranks if one not in came]
        return decide(f"{self._text(mine, *came)}, {_ranks(missing)} did not within {limit:g} s")

    def _difference(self, who: int, theirs: _Dropped, mine: _Dropped) -> str:
        return f"{self._text(theirs, who)}, {self._text(mine)}"

    def _text(self, dropped: _Dropped, *who: int) -> str:
        """Says what ranks have dropped; this one by default."""
        how = "heard of another rank's failure in" if dropped.told else "dropped"
        step, buckets = dropped.step + self.first_step, dropped.launched
        return f"{_ranks(who or [self._rank])} {how} step {step} after {buckets} buckets"

    def _key(self) -> str:
        return f"ddp_core/{self._name}/abandoned/{self._number}"

    def _forget(self, number: int) -> None:
        """Removes the keys of an earlier step: all ranks have passed it, and nobody looks there."""
        key = f"ddp_core/{self._name}/abandoned/{number}"
        names = [f"{key}/{self._rank}"]
        if self._rank == 0:
            names += [key, f"{key}/came", f"{key}/outcome"]
        if self._store is not None and number >= 0:
            self._store.tell(lambda store: [store.delete_key(name) for name in names])


def _parse(value: bytes) -> tuple[int, _Dropped]:
    rank, step, launched, told = map(int, value.split())
    return rank, _Dropped(step, launched, bool(told))


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_LISTED]))
    more = f" and {len(ranks) - _LISTED} more" * (len(ranks) > _LISTED)
    return f"rank{'s' * (len(ranks) != 1)} {listed}{more}"
