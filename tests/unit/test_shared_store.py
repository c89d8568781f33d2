"""Ranks meet through a store: who came, who dropped alike, and a store that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from commhooks.errors import MismatchError, MissingRankError, SilentStoreError
from commhooks.hook import _handshake as _roll_call
from commhooks.hook._handshake import clear_keys, wait_for_all_ranks
from ddp_core import SharedStore
from ddp_core.reducer import _failures as failures
from ddp_core.reducer._failures import AbortAgreement, FailureBoard, WaitPoint

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=20)
SOON = 0.0  # for questions that are answered at once


class Group:
    """A rank's view of a group."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.fixture
def groups(monkeypatch):
    store = SharedStore(dist.HashStore())
    monkeypatch.setattr(_roll_call, "shared_store", lambda group: store)
    return [Group(rank, 3) for rank in range(3)]


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


def test_ranks_that_came_get_the_same_error_and_all_may_call_again(groups):
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


def test_a_rank_that_comes_to_an_ended_call_gets_an_error(groups, monkeypatch):
    # It had asked for the number of the call before the others gave up.
    point = _roll_call._next_point(groups[1], _roll_call.shared_store(None), SOON)
    assert _call(groups, [0, 2], limit=SHORT)[0] is not None
    monkeypatch.setattr(_roll_call, "_next_point", lambda group, store, end: point)
    [text] = _call(groups, [1])
    assert "rank 1 did not" in text
    monkeypatch.undo()


def test_nobody_else_is_waited_for_without_a_store(monkeypatch):
    monkeypatch.setattr(_roll_call, "shared_store", lambda group: None)
    wait_for_all_ranks("register", Group(0, 3), SHORT)


# ---- steps that ranks have dropped, compared through a store


@pytest.mark.parametrize(
    ("dropped", "peer_dropped", "alike"),
    [
        ((3, 2, False), (3, 2, False), True),
        ((3, 2, False), (3, 4, False), False),
        ((3, 2, False), (4, 2, False), False),
        ((3, 2, False), (3, 2, True), False),
    ],
)
def test_only_ranks_that_have_dropped_alike_go_on(
    dropped: Any, peer_dropped: Any, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "group_timeout_s", lambda group: 20.0)
    store = SharedStore(dist.HashStore())

    def rank(number: int) -> str:
        group: Any = SimpleNamespace(rank=lambda: number, size=lambda: 2)
        known = AbortAgreement(group, store, "0")
        step, launched, notified = peer_dropped if number else dropped
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


PLACE = WaitPoint(backward_count=50, step=50, bucket=0)


class Stopping:
    """A store whose host stops, and may go on."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.goes_on.wait()
            return getattr(self.store, name)(*args)

        return call


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopping]:
    """Asked by rank 1; rank 0 has a client of its own."""
    stopping = Stopping()
    shared = {0: SharedStore(stopping.store), 1: SharedStore(stopping)}
    for module in (_roll_call, failures):
        monkeypatch.setattr(module, "shared_store", lambda group: shared[group.rank()])
    monkeypatch.setattr(failures, "group_timeout_s", lambda group: 0.2)
    yield stopping
    stopping.goes_on.set()


def _seconds(call: Any) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


def test_a_silent_store_is_waited_for_as_long_as_the_limit(store: Stopping) -> None:
    shared = SharedStore(store)
    shared.call(lambda inner: inner.set("key", "text"), 10.0)
    assert shared.wait_for("key", 10.0) == "text"
    assert shared.wait_for("other", 0.1) is None
    store.goes_on.clear()
    begin = time.monotonic()
    with pytest.raises(SilentStoreError, match=r"has not answered for 1\.1 s"):
        shared.call(lambda inner: inner.check(["key"]), 1.1)
    assert time.monotonic() - begin < 10
    # From now on at once, for whoever waits for something else.
    assert _seconds(lambda: shared.try_call(lambda inner: inner.check(["key"]), 20.0)) < 5
    assert _seconds(lambda: shared.call_soon(lambda inner: inner.set("told", "late"), 20.0)) < 5
    store.goes_on.set()
    assert shared.wait_for("told", 10.0) == "late"
    assert shared.try_call(lambda inner: inner.check(["key"]), 10.0) is True


def test_what_a_store_raises_is_raised(store: Stopping) -> None:
    with pytest.raises(ZeroDivisionError):
        SharedStore(store).call(lambda inner: 1 / 0, 10.0)


def test_a_child_of_fork_asks_nothing(store: Stopping, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedStore(store)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match=r"os\.fork"):
        shared.call(lambda inner: inner.check(["key"]), 10.0)


def test_who_waits_for_a_bucket_does_not_wait_for_the_board(store: Stopping) -> None:
    board, other = FailureBoard(Group(1), "0"), FailureBoard(Group(0), "0")  # type: ignore[arg-type]
    store.goes_on.clear()
    assert _seconds(lambda: [board.poll(PLACE) for _ in range(20)]) < 10
    assert _seconds(lambda: [board.post(attempt, "late") for attempt in range(20)]) < 10
    store.goes_on.set()
    other.post(50, "words")
    while (text := board.poll(PLACE)) is None:
        time.sleep(0.01)
    assert text == "rank 0: words"


def test_ranks_that_dropped_a_step_end_within_the_timeout(store: Stopping) -> None:
    board = FailureBoard(Group(1), "0")  # type: ignore[arg-type]
    board.abort_agreement.record(3, 2, from_peer=False)
    store.goes_on.clear()
    with pytest.raises(MismatchError, match="has not answered"):
        board.abort_agreement.agree()


def test_a_call_that_a_silent_store_ended_is_reported_to_the_others(
    store: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, limit = [Group(0), Group(1)], timedelta(seconds=0.2)
    begun: list[str] = []

    wait_for = SharedStore.wait_for

    def stop(inner: SharedStore, key: str, limit: float) -> str | None:
        store.goes_on.clear()
        begun.append(key)
        return wait_for(inner, key, limit)

    monkeypatch.setattr(SharedStore, "wait_for", stop)
    with pytest.raises(SilentStoreError, match=r"^register: the process that holds the store"):
        _roll_call.wait_for_all_ranks("register", groups[1], limit)  # type: ignore[arg-type]
    store.goes_on.set()
    monkeypatch.undo()
    outcome = SharedStore(store.store).wait_for(begun[0], 10.0)
    assert outcome == "rank 1 gave up: its store was silent"
    # Both begin anew, and meet.
    shared = {rank: SharedStore(store.store) for rank in range(2)}
    monkeypatch.setattr(_roll_call, "shared_store", lambda group: shared[group.rank()])
    long = timedelta(seconds=20)
    threads = [
        threading.Thread(target=_roll_call.wait_for_all_ranks, args=("switch", group, long))
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert _roll_call._calls[groups[0]] == _roll_call._calls[groups[1]]  # type: ignore[index]
