"""Ranks meet through a store in memory: who came, and who dropped alike; with threads for ranks."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from commhooks.errors import MissingRankError
from commhooks.hook import _handshake as _roll_call
from commhooks.hook._handshake import clear_keys, wait_for_all_ranks
from ddp_core import MismatchError, SharedStore
from ddp_core.reducer import _failures as abandoned
from ddp_core.reducer._failures import AbortAgreement

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=20)
SOON = 0.0  # for questions that are answered at once


class _Group:
    """A rank's view of a group."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


@pytest.fixture
def groups(monkeypatch):
    store = SharedStore(dist.HashStore())
    monkeypatch.setattr(_roll_call, "shared_store", lambda group: store)
    return [_Group(rank, 3) for rank in range(3)]


def _call(groups, ranks, *, limit=LONG, call="register", before=lambda rank: None):
    """The outcome of each of ``ranks``: None or the error's text."""
    texts = {}

    def run(rank):
        before(rank)
        try:
            wait_for_all_ranks(call, groups[rank], limit)
            texts[rank] = None
        except MissingRankError as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [texts[rank] for rank in ranks]


def test_all_come_again_and_again(groups):
    for _ in range(3):
        assert _call(groups, [0, 1, 2]) == [None] * 3
        for group in groups:
            clear_keys(group)


def test_a_slow_rank_is_waited_for(groups):
    slow = lambda rank: time.sleep(0.3 * (rank == 1))  # noqa: E731
    assert _call(groups, [0, 1, 2], before=slow) == [None] * 3


def test_who_came_is_told_the_same_words_and_all_may_call_again(groups):
    assert _call(groups, [0, 1, 2]) == [None] * 3
    first, second = _call(groups, [0, 2], limit=SHORT, call="switch")
    assert first == second
    assert first.startswith("switch: not every rank came: rank 1 did not within 0.3 s, ")
    assert "ranks 0, 2 did" in first
    assert _call(groups, [0, 1, 2]) == [None] * 3


def test_ranks_that_give_up_one_after_the_other_meet_again(groups, monkeypatch):
    wait, points = SharedStore.wait_for, []

    def give_up_late(store, key, limit):
        """Rank 1 gives up when rank 0 has given up and called again."""
        monkeypatch.setattr(SharedStore, "wait_for", wait)
        with pytest.raises(MissingRankError):
            wait_for_all_ranks("switch", groups[0], SHORT)
        points.append(_roll_call._next_point(groups[0], store, SOON).key)

    monkeypatch.setattr(SharedStore, "wait_for", give_up_late)
    with pytest.raises(MissingRankError):
        wait_for_all_ranks("switch", groups[1], SHORT)
    store = _roll_call.shared_store(None)
    later = [_roll_call._next_point(groups[rank], store, SOON).key for rank in (1, 2)]
    assert later == points * 2


def test_a_rank_that_comes_to_an_ended_call_is_told(groups, monkeypatch):
    # It had asked for the number of the call before the others gave up.
    point = _roll_call._next_point(groups[1], _roll_call.shared_store(None), SOON)
    assert _call(groups, [0, 2], limit=SHORT)[0] is not None
    monkeypatch.setattr(_roll_call, "_next_point", lambda group, store, end: point)
    [text] = _call(groups, [1])
    assert "rank 1 did not" in text
    monkeypatch.undo()


def test_nobody_else_is_waited_for_without_a_store(monkeypatch):
    monkeypatch.setattr(_roll_call, "shared_store", lambda group: None)
    wait_for_all_ranks("register", _Group(0, 3), SHORT)


# ---- steps that ranks have dropped, compared through a store


@pytest.mark.parametrize(
    ("ours", "theirs", "alike"),
    [
        ((3, 2, False), (3, 2, False), True),
        ((3, 2, False), (3, 4, False), False),
        ((3, 2, False), (4, 2, False), False),
        ((3, 2, False), (3, 2, True), False),
    ],
)
def test_only_ranks_that_have_dropped_alike_go_on(
    ours: Any, theirs: Any, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abandoned, "group_timeout_s", lambda group: 20.0)
    store = SharedStore(dist.HashStore())

    def rank(number: int) -> str:
        group: Any = SimpleNamespace(rank=lambda: number, size=lambda: 2)
        known = AbortAgreement(group, store, "0")
        step, launched, notified = theirs if number else ours
        for _ in range(3):  # may happen again
            known.record(step, launched, from_peer=notified)
            try:
                known.agree()
            except MismatchError as error:
                return str(error)
            step += 1
        return ""

    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(rank, range(2)))
    assert (texts == ["", ""]) is alike
    assert texts[0] == texts[1]
