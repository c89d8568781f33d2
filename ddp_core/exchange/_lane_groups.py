"""Makes process groups for lanes, and keeps them for the next hook on a group of the same ranks.

A lane issues the collectives of one round of exchanges, on a process group of its own.

A Gloo group finds its peers by its name in a store, so a name must not be used twice, and all ranks
have to use the same name. torch's own names for groups of some ranks are a hash of these ranks and
of how many groups a rank has: they recur after a group was destroyed, and differ where one rank
has destroyed a group that another still holds. Here ranks compare, each time, which groups are
free.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_core._torch import (
    add_backend,
    backend_of,
    group_ranks,
    is_known_group,
    set_default_backend,
    set_group_name,
    set_timeout,
)
from ddp_core.exchange._shared_store import (
    SharedStore,
    group_timeout,
    group_timeout_s,
    shared_store,
)

__all__ = [
    "LaneGroup",
    "acquire_lane_groups",
    "backend_for",
    "cpu_backend",
    "is_gloo",
    "is_nccl",
    "make_with_timeout",
    "private_group",
]

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_EXTRA_S = 1.0  # seconds that a store has beyond the timeout of a wait for other ranks


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the backend of a group for ``device``, without a wrapper that checks collectives."""
    backend: Any = None
    with contextlib.suppress(Exception):  # a group that another library made has none
        backend = backend_of(group, device)
        backend = getattr(backend, "wrapped_pg", backend)
    return backend


def cpu_backend(group: dist.ProcessGroup) -> Any:
    """Returns the backend of ``group`` for CPU tensors."""
    return backend_for(group, _CPU)


def is_gloo(backend: object) -> bool:
    """Whether a backend is Gloo."""
    return dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)


def is_nccl(backend: object) -> bool:
    """Whether a backend is NCCL."""
    return dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)


@dataclass(eq=False)
class LaneGroup:
    """Holds the process group of one lane.

    Attributes:
        issued: collectives so far. If ranks differ in this count, the next ones would not match.
        completed: how many of these collectives have completed.
        unusable: one of these collectives failed.
    """

    name: str
    group: Any  # dist.ProcessGroup; None once it is destroyed
    pool: _Pool
    issued: int = 0
    completed: int = 0
    unusable: bool = False

    def release(self) -> None:
        """Returns the group to the pool, for the next hook."""
        if self.unusable or self.issued != self.completed or self.pool.closed:
            self.pool.destroy(self)
        else:
            self.pool.free[self.name] = self

    def discard(self, works: Sequence[Any] = ()) -> None:
        """Destroys the group without waiting for other ranks, which may have ended.

        Args:
            works: work handles of collectives that may be under way.
        """
        self.unusable = True
        events = [_done_event(work) for work in works]
        if events:
            self.pool.destroy_later(self, lambda: [event.wait() for event in events])
        else:
            self.pool.destroy(self)


def _done_event(work: Any) -> threading.Event:
    """Returns an event that is set when a collective has completed, or failed."""
    done = threading.Event()
    # Not ``work.wait`` on the thread: if the interpreter ends meanwhile, that aborts the process.
    work.get_future().add_done_callback(lambda _: done.set())
    return done


class _Pool:
    """Holds the lane groups of one process group."""

    def __init__(self) -> None:
        self.all: dict[str, LaneGroup] = {}
        self.free: dict[str, LaneGroup] = {}
        self.closed = False
        self.is_inherited = False  # by a child of os.fork(), see _leak_groups

    def destroy(self, lane_group: LaneGroup) -> None:
        if self.is_inherited:
            return
        self.all.pop(lane_group.name, None)
        self.free.pop(lane_group.name, None)
        group, lane_group.group = lane_group.group, None
        with contextlib.suppress(Exception):
            if is_known_group(group):
                dist.destroy_process_group(group)
            elif group is not None:
                group.shutdown()

    def destroy_later(self, lane_group: LaneGroup, wait: Callable[[], object]) -> None:
        """Destroys a group on another thread, once ``wait`` has returned.

        Gloo has no abort: destroying a group blocks until its running collective ends, which takes
        until the timeout if another rank is silent.
        """
        self.all.pop(lane_group.name, None)
        self.free.pop(lane_group.name, None)
        threading.Thread(
            target=_destroy_later,
            args=(self, lane_group, wait),
            name="commhooks-pool",
            daemon=True,
        ).start()

    def close(self) -> None:
        self.closed = True
        for lane_group in list(self.free.values()):
            self.destroy(lane_group)


def _destroy_later(pool: _Pool, lane_group: LaneGroup, wait: Callable[[], object]) -> None:
    wait()
    pool.destroy(lane_group)


# By parent group; a pool is closed with its parent, or when the interpreter ends.
_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, _Pool] = weakref.WeakKeyDictionary()


def _leak_groups() -> None:
    """Keeps the parent's process groups open in a child of os.fork(), which cannot close them.

    A group waits for its threads when it is destroyed. The child has none of these threads, so it
    would wait for ever, or abort.
    """
    if not dist.is_available():
        return
    groups = list(group_ranks())
    for pool in _pools.values():
        pool.is_inherited = True
        groups += [lane_group.group for lane_group in pool.all.values()]
    for group in groups:  # a list would not do: the interpreter clears it when it ends
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_leak_groups)


def acquire_lane_groups(parent: dist.ProcessGroup, count: int) -> list[LaneGroup]:
    """Returns ``count`` groups with the ranks of ``parent``, the same on all ranks; a collective.

    Raises:
        RuntimeError: torch.distributed does not know ``parent``.
    """
    store = shared_store(parent)
    if store is None:
        raise RuntimeError(
            f"Lanes: a scheme of several rounds needs a process group for each further round, with "
            f"the ranks of {type(parent).__name__}, which is no group that torch.distributed made "
            f"(or it is destroyed). Use a scheme of one round there, or pass a group of "
            f"torch.distributed.new_group as process_group"
        )
    pool = _pools.get(parent)
    if pool is None:
        pool = _pools[parent] = _Pool()
        weakref.finalize(parent, pool.close)
    offer = {
        "new": uuid.uuid4().hex,
        "all": sorted(pool.all),
        "free": {name: lane_group.issued for name, lane_group in pool.free.items()},
    }
    offers: list[Any] = [None] * parent.size()
    dist.all_gather_object(offers, offer, group=parent)

    # A group can be used again if it is free on every rank, and all ranks have issued as many
    # collectives on it.
    on_all = set.intersection(*(set(offer_of_rank["all"]) for offer_of_rank in offers))
    reusable = set.intersection(*(set(offer_of_rank["free"].items()) for offer_of_rank in offers))
    free_on_all = set.intersection(*(set(offer_of_rank["free"]) for offer_of_rank in offers))
    unusable_names = (set(offer["free"]) - on_all) | (free_on_all - {name for name, _ in reusable})
    for name in unusable_names:
        pool.destroy(pool.free[name])
    acquired = [pool.free.pop(name) for name, _ in sorted(reusable)[:count]]
    if len(acquired) < count:
        for number in range(count - len(acquired)):
            name = f"lane/{offers[0]['new']}/{number}"
            pool.all[name] = LaneGroup(name, _make(parent, name, store), pool)
            acquired.append(pool.all[name])
        # A rank may end right after this, but not while another still connects to it.
        dist.barrier(parent)
    return acquired


def _make(parent: dist.ProcessGroup, name: str, store: SharedStore) -> Any:
    """Makes a group of the same ranks; its collectives return a work handle at once."""
    if is_gloo(cpu_backend(parent)):
        seconds, arguments = group_timeout_s(parent), (parent.rank(), parent.size(), name)
        timeout = timedelta(seconds=seconds)
        return store.call(
            lambda client: private_group(client, *arguments, _CPU, timeout), seconds + _EXTRA_S
        )
    ranks = dist.get_process_group_ranks(parent)
    return make_with_timeout(
        parent,
        lambda: dist.new_group(
            ranks,
            timeout=group_timeout(parent),
            backend=dist.get_backend(parent),
            use_local_synchronization=len(ranks) != dist.get_world_size(),
        ),
    )


def make_with_timeout(parent: dist.ProcessGroup, make: Callable[[], _T]) -> _T:
    """Calls ``make``, which connects the ranks of a new group through the store; returns the group.

    Raises:
        SilentStoreError: the store of ``parent`` does not answer within its timeout.
    """
    store = shared_store(parent)
    if store is None:
        return make()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # -1: none

    def on_thread(_: Any) -> _T:
        with torch.cuda.device(device):  # each thread has its own current device
            return make()

    return store.call(on_thread, group_timeout_s(parent) + _EXTRA_S)


def private_group(
    store: Any, rank: int, size: int, name: str, device: torch.device, timeout: timedelta
) -> Any:
    """Makes a Gloo group, or an NCCL group for a GPU; waits for its ranks.

    torch.distributed does not know the group, so that destroying the default group does not close
    it, and TORCH_DISTRIBUTED_DEBUG=DETAIL does not wrap it: a wrapped collective returns only once
    all ranks have issued it, for which a thread that serves other lanes must not wait.
    """
    store = dist.distributed_c10d.PrefixStore(name, store)
    backend: Any
    if device.type == "cpu":
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    else:
        kind, options = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL.Options()
        set_timeout(options, timeout)
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    group: Any = dist.ProcessGroup(store, rank, size)
    set_default_backend(group, kind)
    add_backend(group, device, kind, backend)
    set_group_name(group, name)
    return group
