"""Makes process groups for lanes, and keeps them for the next hook on a group of the same ranks.

A Gloo group finds its peers by its name in a store, so a name must not be used twice, and all ranks
have to use the same name. torch's own names for groups of some ranks are a hash of these ranks and
of how many groups a rank has: used again after a group has gone, and different where one rank has
dropped a group that another still holds. Here ranks compare, each time, which groups are free.
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
    "host_backend",
    "is_gloo",
    "is_nccl",
    "make_with_timeout",
    "private_group",
]

_T = TypeVar("_T")
_CPU = torch.device("cpu")
_MORE = 1.0  # seconds from the timeout of a wait for other ranks until the store counts as silent


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the backend of a group for ``device``, without a wrapper that checks collectives."""
    backend: Any = None
    with contextlib.suppress(Exception):  # a group that another library made has none
        backend = backend_of(group, device)
        backend = getattr(backend, "wrapped_pg", backend)
    return backend


def host_backend(group: dist.ProcessGroup) -> Any:
    """Returns the backend of ``group`` for host tensors."""
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
        completed: how many of these collectives have ended.
        unusable: one of these collectives failed.
    """

    name: str
    group: Any  # dist.ProcessGroup; None once it is dropped
    pool: _Pool
    issued: int = 0
    completed: int = 0
    unusable: bool = False

    def release_group(self) -> None:
        """Returns the group to the pool, for the next hook."""
        if self.unusable or self.issued != self.completed or self.pool.closed:
            self.pool.drop(self)
        else:
            self.pool.free[self.name] = self

    def discard(self, works: Sequence[Any] = ()) -> None:
        """Drops the group without waiting for other ranks, which may be gone.

        Args:
            works: collectives that may be under way.
        """
        self.unusable = True
        ends = [_end_of(work) for work in works]
        if ends:
            self.pool.drop_later(self, lambda: [end.wait() for end in ends])
        else:
            self.pool.drop(self)


def _end_of(work: Any) -> threading.Event:
    """Returns an event that is set when a collective has ended, with or without an error."""
    end = threading.Event()
    # Not ``work.wait`` on the thread: when the interpreter ends meanwhile, that aborts the process.
    work.get_future().add_done_callback(lambda _: end.set())
    return end


class _Pool:
    """Holds the lane groups of one process group."""

    def __init__(self) -> None:
        self.all: dict[str, LaneGroup] = {}
        self.free: dict[str, LaneGroup] = {}
        self.closed = False
        self.is_inherited = False  # by a child of os.fork(), see _keep

    def drop(self, lent: LaneGroup) -> None:
        if self.is_inherited:
            return
        self.all.pop(lent.name, None)
        self.free.pop(lent.name, None)
        group, lent.group = lent.group, None
        with contextlib.suppress(Exception):
            if is_known_group(group):
                dist.destroy_process_group(group)
            elif group is not None:
                group.shutdown()

    def drop_later(self, lent: LaneGroup, ended: Callable[[], object]) -> None:
        """Drops a group on another thread, once ``ended`` has returned.

        Gloo knows no abort: a group that is dropped with a collective under way makes its dropper
        wait for the collective, until the timeout if another rank is silent.
        """
        self.all.pop(lent.name, None)
        self.free.pop(lent.name, None)
        threading.Thread(
            target=_drop_later, args=(self, lent, ended), name="commhooks-drop", daemon=True
        ).start()

    def close(self) -> None:
        self.closed = True
        for lent in list(self.free.values()):
            self.drop(lent)


def _drop_later(pool: _Pool, lent: LaneGroup, ended: Callable[[], object]) -> None:
    ended()
    pool.drop(lent)


# By the group they belong to; they go with it, or when the interpreter ends.
_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, _Pool] = weakref.WeakKeyDictionary()


def _keep() -> None:
    """Keeps the parent's process groups open in a child of os.fork(), which cannot close them.

    A group waits for its threads when it is destroyed. The child has none of these threads, so it
    would wait for ever, or abort.
    """
    if not dist.is_available():
        return
    groups = list(group_ranks())
    for pool in _pools.values():
        pool.is_inherited = True
        groups += [lent.group for lent in pool.all.values()]
    for group in groups:  # no list would do: the interpreter clears those when it ends
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_keep)


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
        "free": {name: lent.issued for name, lent in pool.free.items()},
    }
    offers: list[Any] = [None] * parent.size()
    dist.all_gather_object(offers, offer, group=parent)

    # A group is of use where every rank has it free and has issued as many collectives on it.
    on_all = set.intersection(*(set(offer_of_rank["all"]) for offer_of_rank in offers))
    alike = set.intersection(*(set(offer_of_rank["free"].items()) for offer_of_rank in offers))
    free_on_all = set.intersection(*(set(offer_of_rank["free"]) for offer_of_rank in offers))
    useless = (set(offer["free"]) - on_all) | (free_on_all - {name for name, _ in alike})
    for name in useless:
        pool.drop(pool.free[name])
    taken = [pool.free.pop(name) for name, _ in sorted(alike)[:count]]
    if len(taken) < count:
        for number in range(count - len(taken)):
            name = f"lane/{offers[0]['new']}/{number}"
            pool.all[name] = LaneGroup(name, _make(parent, name, store), pool)
            taken.append(pool.all[name])
        # A rank may end at once, but not while another still connects to it.
        dist.barrier(parent)
    return taken


def _make(parent: dist.ProcessGroup, name: str, store: SharedStore) -> Any:
    """Makes a group of the same ranks whose collectives return at once."""
    if is_gloo(host_backend(parent)):
        seconds, place = group_timeout_s(parent), (parent.rank(), parent.size(), name)
        limit = timedelta(seconds=seconds)
        return store.call(
            lambda client: private_group(client, *place, _CPU, limit), seconds + _MORE
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
    """Returns what ``make`` returns: a group whose ranks connect through the store.

    Raises:
        SilentStoreError: the store of ``parent`` does not answer within its timeout.
    """
    store = shared_store(parent)
    if store is None:
        return make()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # -1: none

    def made(_: Any) -> _T:
        with torch.cuda.device(device):  # a thread has its own
            return make()

    return store.call(made, group_timeout_s(parent) + _MORE)


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
