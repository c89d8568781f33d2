"""Calls the store that all ranks of a group share, always with a timeout.

A call on a TCPStore returns when its server has answered. If the server is silent (its process is
stopped, its host without power, the cable cut) the call does not return, whatever ``set_timeout``
says, nor does a call on a clone; and other users of the client wait behind it. So a thread makes
the calls, and callers wait for the thread, which ends when no call is left.
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
    "PrefixedStore",
    "SharedStore",
    "StoreBarrier",
    "get_text",
    "group_store",
    "group_timeout",
    "group_timeout_s",
    "set_once",
    "shared_store",
]

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_DEFAULT_TIMEOUT = timedelta(minutes=5)  # if the backend has none
# A store that answers does so in milliseconds, also on a busy machine. A call that is made when the
# time of its caller is over has this many seconds.
_MIN_TIMEOUT_S = 1.0


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout of ``group``; None if the backend has none."""
    for device in (_CPU, *device_types(group)):
        with contextlib.suppress(Exception):
            backend = backend_of(group, device)
            backend = getattr(backend, "wrapped_pg", backend)
            return timedelta(seconds=backend_timeout(backend.options).total_seconds())
    return None


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Returns the timeout of ``group`` in seconds; 5 minutes if the backend has none."""
    return (group_timeout(group) or _DEFAULT_TIMEOUT).total_seconds()


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


class _Call:
    """Holds a call on a store, and its result."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_abandoned = False  # no caller waits for the result

    def run(self, store: Any) -> None:
        try:
            result = None if self.is_abandoned else self._function(store)
            self.result = None if self.is_abandoned else result
        except BaseException as error:
            self.error = error
        self.done.set()


class SharedStore:
    """Calls a store on a thread, one call after the other.

    Args:
        store: a store of torch, of any kind.

    Example:
        >>> store = SharedStore(torch.distributed.HashStore())
        >>> store.call(lambda client: client.add("arrived", 1), 10.0)
        1
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._thread: threading.Thread | None = None  # while there are calls
        self._overdue: _Call | None = None  # the last one that timed out

    @property
    def is_silent(self) -> bool:
        """Whether a call that timed out has still not returned."""
        return self._overdue is not None and not self._overdue.done.is_set()

    def call(self, function: Callable[[Any], _T], timeout_s: float) -> _T:
        """Returns what ``function(store)`` returns, and raises what it raises.

        Args:
            timeout_s: seconds; at least one, since callers call after they have waited for a rank.

        Raises:
            SilentStoreError: the store has not answered within ``timeout_s``.
        """
        call, timeout_s = self._enqueue(function), max(timeout_s, _MIN_TIMEOUT_S)
        if not call.done.wait(timeout_s):
            call.is_abandoned, self._overdue = True, call
            address, seconds = _address(self.store), round(timeout_s, 1)
            raise SilentStoreError(
                f"the process that holds the store of the process group{address} has not answered "
                f"for {seconds:g} s: it is stopped, or its host or the link to it is down. As a "
                f"rule it is rank 0's, or the launcher's; look at its output"
            )
        error, call.error = call.error, None  # its traceback refers to the call
        if error is not None:
            raise error
        result: _T = call.result
        return result

    def try_call(self, function: Callable[[Any], _T], timeout_s: float) -> _T | None:
        """Returns what :meth:`call` returns, or None if the store has been silent or fails.

        It is for callers whose actual wait has a timeout of its own.
        """
        if self.is_silent:
            return None
        with contextlib.suppress(Exception):
            return self.call(function, timeout_s)
        return None

    def call_soon(self, function: Callable[[Any], object], timeout_s: float = 0.0) -> None:
        """Calls ``function(store)`` soon; never raises.

        Args:
            timeout_s: seconds to wait until the call is made, unless the store has been silent.
        """
        with contextlib.suppress(RuntimeError):
            call = self._enqueue(function)
            if timeout_s and not self.is_silent and not call.done.wait(timeout_s):
                self._overdue = call

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Returns the text of a key once it is set; None after ``timeout_s``.

        Raises:
            SilentStoreError: the store does not answer.
        """
        # Polls: the store's own ``wait`` keeps all other threads of the process from the store.
        get, end, pause = get_text(key), time.monotonic() + timeout_s, 1e-3
        while (text := self.call(get, end - time.monotonic())) is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return text

    def _enqueue(self, function: Callable[[Any], Any]) -> _Call:
        if os.getpid() != self._process:
            raise RuntimeError(
                "a process group belongs to the process that made it: a child of os.fork() cannot "
                "take part in it"
            )
        call = _Call(function)
        with self._lock:
            self._calls.append(call)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ddp_core-store", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter ends
                    self._calls.clear()
                    raise
                self._thread = thread
                _with_threads.add(self)
        return call

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.popleft()
            call.run(self.store)
            del call  # with its result, which may be a process group


# By group. A group may be given another store later (torchft).
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedStore] = weakref.WeakKeyDictionary()
_with_threads: weakref.WeakSet[SharedStore] = weakref.WeakSet()


def shared_store(group: dist.ProcessGroup) -> SharedStore | None:
    """Returns the shared store of ``group``; None if the group has none."""
    store, known = group_store(group), _stores.get(group)
    if store is None or (known is not None and known.store is store):
        return known if store is not None else None
    _stores[group] = shared = SharedStore(store)
    return shared


@atexit.register
def _join_threads() -> None:
    """Joins threads before the interpreter ends, which a thread that returns later would abort."""
    end = time.monotonic() + _MIN_TIMEOUT_S
    for store in list(_with_threads):
        thread = store._thread
        if thread is not None and not store.is_silent:
            thread.join(timeout=max(0.0, end - time.monotonic()))


def _address(store: Any) -> str:
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    return f" (at {store.host}:{store.port})" if isinstance(store, tcp) else ""


# ---- keys and barriers


def get_text(key: str) -> Callable[[Any], str | None]:
    """Returns a function of a store that returns the text of a key, or None if it is not set."""
    return lambda store: store.get(key).decode() if store.check([key]) else None


def set_once(key: str, text: str) -> Callable[[Any], str]:
    """Returns a function of a store that sets a key unless it is set, and returns its text."""
    return lambda store: str(store.compare_set(key, "", text).decode())


class StoreBarrier(NamedTuple):
    """Waits for all ranks at keys of a store that begin with ``key``, once."""

    store: SharedStore
    key: str
    rank: int
    size: int

    def set_outcome(self, outcome: str) -> Callable[[Any], str]:
        """Returns a function of a store that sets the outcome unless it is set, and returns it."""
        return set_once(f"{self.key}/outcome", outcome)

    def wait_for_all(self, outcome: str, end: float) -> str | None:
        """Arrives; returns the outcome (``outcome`` if all arrive), or None after ``end``."""

        def arrive(store: Any) -> str | None:
            store.set(f"{self.key}/{self.rank}", "")
            is_last = store.add(f"{self.key}/came", 1) == self.size
            return self.set_outcome(outcome)(store) if is_last else None

        ended = self.store.call(arrive, end - time.monotonic())
        return ended or self.store.wait_for(f"{self.key}/outcome", end - time.monotonic())

    def arrived_ranks(self) -> tuple[list[int], list[int]]:
        """Returns the ranks that have arrived until now, and the others."""
        keys = {rank: f"{self.key}/{rank}" for rank in range(self.size)}
        arrived = self.store.call(
            lambda store: [rank for rank in keys if store.check([keys[rank]])], 0.0
        )
        return arrived, [rank for rank in keys if rank not in arrived]

    def delete_keys(self) -> None:
        """Deletes the keys, when all ranks have read them."""
        # Otherwise every barrier of a long job leaves keys in the memory of the store's process.
        names = [f"{self.key}/{self.rank}"]
        if self.rank == 0:
            names += [f"{self.key}/came", f"{self.key}/outcome", self.key]
        # Some stores do not delete keys: that is no error.
        self.store.call_soon(lambda store: [store.delete_key(name) for name in names])


class PrefixedStore:
    """Exchanges texts between ranks through the store of their group, during one public call.

    Keys are prefixed by the call's name and number, which are equal on all ranks and used once.
    """

    def __init__(self, group: dist.ProcessGroup, call: str, number: int, timeout_s: float) -> None:
        prefixed = dist.distributed_c10d.PrefixStore(f"{call}/{number}", group_store(group))
        self.store, self._call, self._timeout_s = SharedStore(prefixed), call, timeout_s

    def set(self, key: str, text: str) -> None:
        """Sets a key for all ranks."""
        self.store.call(lambda store: store.set(key, text), self._timeout_s)

    def get(self, key: str) -> str:
        """Waits for a key and returns its text; raises MissingRankError if no rank sets it."""
        text = self.store.wait_for(key, self._timeout_s)
        if text is None:
            raise MissingRankError(
                f"{self._call}: {key!r} of another rank did not come within {self._timeout_s:g} s; "
                f"all ranks call it, between the same steps"
            )
        return text
