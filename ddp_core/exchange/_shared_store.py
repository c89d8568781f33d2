"""Calls the store that all ranks of a group share, and always with a limit.

A call on a TCPStore returns when its host has answered. If the host is silent (stopped, without
power, its cable cut) the call does not return, whatever ``set_timeout`` says, nor does it on a
clone; and other users of the client wait behind it. So a thread asks, and callers wait for the
thread, which ends when nothing is left to ask.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ddp_core._torch import backend_of, backend_timeout, device_types, store_of
from ddp_core.exchange._errors import MissingRankError, SilentStoreError

__all__ = [
    "Notes",
    "SharedStore",
    "StoreBarrier",
    "first_decides",
    "group_limit",
    "group_store",
    "group_timeout",
    "shared_store",
    "text_of",
]

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_DEFAULT = timedelta(minutes=5)  # if the group has no limit
# A store that answers does so in milliseconds, also on a busy machine. A question that is asked
# when a limit is over may take this many seconds more.
_GRACE = 1.0


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout of ``group``; None if the backend has none."""
    for device in (_CPU, *device_types(group)):
        with contextlib.suppress(Exception):
            backend = backend_of(group, device)
            backend = getattr(backend, "wrapped_pg", backend)
            return timedelta(seconds=backend_timeout(backend.options).total_seconds())
    return None


def group_limit(group: dist.ProcessGroup) -> float:
    """Returns the longest wait for the ranks of ``group``, in seconds."""
    return (group_timeout(group) or _DEFAULT).total_seconds()


def group_store(group: dist.ProcessGroup) -> Any:
    """Returns the store that all ranks of ``group`` share; None if the group has none.

    It is for making groups: a call on it may never return, see :func:`shared_store`.
    """
    with contextlib.suppress(Exception):
        return store_of(group)
    # A group that another library made of torch's classes (torchft) has its own.
    with contextlib.suppress(Exception):
        return group.get_group_store()
    return None


class _Question:
    """Holds a call on a store, and its result."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self._ask = ask
        self.answered = threading.Event()
        self.answer: Any = None
        self.error: BaseException | None = None
        self.is_dropped = False  # no caller waits for the answer

    def run(self, store: Any) -> None:
        try:
            answer = None if self.is_dropped else self._ask(store)
            self.answer = None if self.is_dropped else answer
        except BaseException as error:
            self.error = error
        self.answered.set()


class SharedStore:
    """Calls a store on a thread, one question after the other.

    Args:
        store: a store of torch, of any kind.

    Example:
        >>> store = SharedStore(torch.distributed.HashStore())
        >>> store.ask(lambda it: it.add("came", 1), 10.0)
        1
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._questions: deque[_Question] = deque()
        self._thread: threading.Thread | None = None  # while there are questions
        self._overdue: _Question | None = None  # the last one whose limit passed

    @property
    def is_silent(self) -> bool:
        """Whether a question is still unanswered though its limit has passed."""
        return self._overdue is not None and not self._overdue.answered.is_set()

    def ask(self, question: Callable[[Any], _T], limit: float) -> _T:
        """Returns what ``question(store)`` returns, and raises what it raises.

        Args:
            limit: seconds; at least one, since callers ask after they have waited for a rank.

        Raises:
            SilentStoreError: the store has not answered within ``limit``.
        """
        asked, limit = self._put(question), max(limit, _GRACE)
        if not asked.answered.wait(limit):
            asked.is_dropped, self._overdue = True, asked
            place, seconds = _place(self.store), round(limit, 1)
            raise SilentStoreError(
                f"the process that holds the store of the process group{place} has not answered "
                f"for {seconds:g} s: it is stopped, or its host or the link to it is down. As a "
                f"rule it is rank 0's, or the launcher's; look at its output"
            )
        error, asked.error = asked.error, None  # its traceback leads to the question
        if error is not None:
            raise error
        answer: _T = asked.answer
        return answer

    def peek(self, question: Callable[[Any], _T], limit: float) -> _T | None:
        """Returns what :meth:`ask` returns, or None if the store has been silent or fails.

        It is for callers whose actual wait has a limit of its own.
        """
        if self.is_silent:
            return None
        with contextlib.suppress(Exception):
            return self.ask(question, limit)
        return None

    def notify(self, message: Callable[[Any], object], limit: float = 0.0) -> None:
        """Calls ``message(store)`` soon; never raises.

        Args:
            limit: seconds to wait until the call is made, unless the store has been silent.
        """
        with contextlib.suppress(RuntimeError):
            asked = self._put(message)
            if limit and not self.is_silent and not asked.answered.wait(limit):
                self._overdue = asked

    def wait_for(self, key: str, limit: float) -> str | None:
        """Returns the text of a key once it is set; None after ``limit`` seconds.

        Raises:
            SilentStoreError: the store does not answer.
        """
        # Polls: the store's own ``wait`` keeps all other threads of the process from the store.
        look, end, pause = text_of(key), time.monotonic() + limit, 1e-3
        while (text := self.ask(look, end - time.monotonic())) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return text

    def _put(self, question: Callable[[Any], Any]) -> _Question:
        if os.getpid() != self._process:
            raise RuntimeError(
                "a process group belongs to the process that made it: a child of os.fork() cannot "
                "take part in it"
            )
        asked = _Question(question)
        with self._lock:
            self._questions.append(asked)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ddp_core-store", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends
                    self._questions.clear()
                    raise
                self._thread = thread
                _asking.add(self)
        return asked

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._questions:
                    self._thread = None
                    return
                asked = self._questions.popleft()
            asked.run(self.store)
            del asked  # with its answer, which may be a group of processes


# By group; a group may be given another store (torchft).
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedStore] = weakref.WeakKeyDictionary()
_asking: weakref.WeakSet[SharedStore] = weakref.WeakSet()


def shared_store(group: dist.ProcessGroup) -> SharedStore | None:
    """Returns the shared store of ``group``; None if the group has none."""
    store, known = group_store(group), _stores.get(group)
    if store is None or (known is not None and known.store is store):
        return known if store is not None else None
    _stores[group] = shared = SharedStore(store)
    return shared


@atexit.register
def _end() -> None:
    """Joins threads before the interpreter ends, which a thread that returns later would abort."""
    end = time.monotonic() + _GRACE
    for store in list(_asking):
        thread = store._thread
        if thread is not None and not store.is_silent:
            thread.join(timeout=max(0.0, end - time.monotonic()))


def _place(store: Any) -> str:
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    return f" (at {store.host}:{store.port})" if isinstance(store, tcp) else ""


# ---- ranks that meet


def text_of(key: str) -> Callable[[Any], str | None]:
    """Returns a question that reads the text of a key, or None if it is not set."""
    return lambda store: store.get(key).decode() if store.check([key]) else None


def first_decides(key: str, text: str) -> Callable[[Any], str]:
    """Returns a question that sets a key once, for all ranks, and returns what was set."""
    return lambda store: str(store.compare_set(key, "", text).decode())


class StoreBarrier(NamedTuple):
    """Waits for all ranks at keys of a store that begin with ``key``, once."""

    store: SharedStore
    key: str
    rank: int
    size: int

    def decide(self, outcome: str) -> Callable[[Any], str]:
        """Returns a question that sets the outcome once, for all ranks, and returns it."""
        return first_decides(f"{self.key}/outcome", outcome)

    def wait_for_all(self, outcome: str, end: float) -> str | None:
        """Arrives; returns the outcome (``outcome`` if all arrive), or None after ``end``."""

        def come(store: Any) -> str | None:
            store.set(f"{self.key}/{self.rank}", "")
            is_last = store.add(f"{self.key}/came", 1) == self.size
            return self.decide(outcome)(store) if is_last else None

        ended = self.store.ask(come, end - time.monotonic())
        return ended or self.store.wait_for(f"{self.key}/outcome", end - time.monotonic())

    def arrived_ranks(self) -> tuple[list[int], list[int]]:
        """Returns the ranks that have arrived until now, and the others."""
        keys = {rank: f"{self.key}/{rank}" for rank in range(self.size)}
        came = self.store.ask(
            lambda store: [rank for rank in keys if store.check([keys[rank]])], 0.0
        )
        return came, [rank for rank in keys if rank not in came]

    def delete_keys(self) -> None:
        """Deletes the keys, when all ranks have read them."""
        # Otherwise every barrier of a long job leaves keys in the memory of the store's process.
        names = [f"{self.key}/{self.rank}"]
        if self.rank == 0:
            names += [f"{self.key}/came", f"{self.key}/outcome", self.key]
        # Some stores do not delete keys: that is no error.
        self.store.notify(lambda store: [store.delete_key(name) for name in names])


class Notes:
    """Exchanges texts between ranks through the store of their group, during one call.

    The call's name and number are the same on all ranks, and are never used again.
    """

    def __init__(self, group: dist.ProcessGroup, call: str, number: int, limit: float) -> None:
        prefixed = dist.distributed_c10d.PrefixStore(f"{call}/{number}", group_store(group))
        self.store, self._call, self._limit = SharedStore(prefixed), call, limit

    def post(self, key: str, text: str) -> None:
        """Writes a text for the other ranks."""
        self.store.ask(lambda store: store.set(key, text), self._limit)

    def read(self, key: str) -> str:
        """Returns a text once a rank has posted it; raises MissingRankError if none does."""
        text = self.store.wait_for(key, self._limit)
        if text is None:
            raise MissingRankError(
                f"{self._call}: {key!r} of another rank did not come within {self._limit:g} s; all "
                f"ranks call it, between the same steps"
            )
        return text
