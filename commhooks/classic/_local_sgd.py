"""``PostLocalSGDState`` and its hook.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import socket
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._hook_access import group_of
from commhooks.classic._launch import BucketFuture, Wires, cast_payloads, classic_hook
from commhooks.classic._owner import Group, Owner, owner_of
from commhooks.core.dense import Dense
from commhooks.errors import RegistrationError
from commhooks.schemes.noop import Noop

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

DENSE, NOOP = Dense(), Noop()


class PostLocalSGDState:
    """Settings of ``post_localSGD_hook``: a global average first, later one in subgroups only.

    Use it with a model averager, e.g. torch's ``PeriodicModelAverager``, which averages the
    parameters globally every so many steps.

    A pickled or copied state keeps its step count and leaves process groups behind. One that had a
    ``subgroup`` needs it again before its first local step.

    Args:
        process_group: ranks of the first steps; None: those of the model.
        subgroup: ranks of the later steps; None: those of ``process_group`` on the same host,
            settled in the first local step.
        start_localSGD_iter: number of global steps first.
        post_local_gradient_allreduce: average in the subgroup afterwards; else not at all.

    Example:
        >>> state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, post_localSGD_hook)

    Reference: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2020.
    """

    # As torch's: a setting with a wrong name is an error.
    __slots__ = (
        "__weakref__",
        "_first_iter",
        "_iters",
        "_lacks_subgroup",
        "_settled",
        "post_local_gradient_allreduce",
        "process_group",
        "start_localSGD_iter",
        "subgroup",
    )

    def __init__(
        self,
        process_group: Group,
        subgroup: Group,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self._first_iter = 0
        self._settled: Group = None  # the subgroup, where none was given
        self._lacks_subgroup = False  # the pickled state had one
        self._iters: weakref.WeakKeyDictionary[Owner, int] = weakref.WeakKeyDictionary()

    @property
    def iter(self) -> int:
        """Global steps so far; it stops counting at ``start_localSGD_iter``."""
        return max(self._iters.values(), default=self._first_iter)

    @iter.setter
    def iter(self, value: int) -> None:
        self._first_iter = value
        self._iters.clear()

    def __getstate__(self) -> dict[str, Any]:
        given = self.subgroup is not None and self.subgroup is not self._settled
        return {
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
            "iter": self.iter,
            "had_subgroup": given or self._lacks_subgroup,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        start, allreduce = saved["start_localSGD_iter"], saved["post_local_gradient_allreduce"]
        self.__init__(None, None, start, allreduce)  # type: ignore[misc]
        self.iter = saved["iter"]
        self._lacks_subgroup = saved["had_subgroup"]

    def _check_subgroup(self) -> None:
        if self._lacks_subgroup:
            raise RegistrationError(
                "PostLocalSGDState: the state that was pickled had a subgroup, which a pickle does "
                "not hold: set state.subgroup on every rank before training goes on"
            )

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts a step at its last bucket, for a hook of one's own that has this for a state.

        The hooks of this package count by themselves, and this does nothing where they run.
        """
        if bucket.is_last() and not self._iters:
            self._first_iter += 1

    def _launch(self, bucket: GradBucket, wires: Wires) -> BucketFuture:
        owner = owner_of(bucket.parameters())
        if owner not in self._iters:
            smaller = [count for other, count in self._iters.items() if owner.extends(other)]
            self._iters[owner] = max(smaller, default=self._first_iter)
        step = self._iters[owner]
        group, scheme = self.process_group, cast_payloads(DENSE, wires)
        if step < self.start_localSGD_iter:
            if bucket.is_last():
                self._iters[owner] = step + 1
        elif not self.post_local_gradient_allreduce:
            scheme = NOOP
        else:
            if self.subgroup is None:
                self._check_subgroup()
                whole = group_of(owner.hook(scheme, group, bucket))
                self.subgroup = self._settled = _same_host_group(whole)
            group = self.subgroup
        return owner.hook(scheme, group, bucket).start(bucket)


def _same_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks of ``group`` on this host; all ranks of ``group`` call it together."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    ranks = dist.get_process_group_ranks(group)
    # A group that only its own ranks make is named by a hash, which may differ between them.
    alone = len(ranks) != dist.get_world_size()
    mine = hosts[group.rank()]
    made: dist.ProcessGroup | None = None
    for host in [mine] if alone else sorted(set(hosts)):
        on_host = [rank for rank, other in zip(ranks, hosts, strict=True) if other == host]
        one: dist.ProcessGroup = dist.new_group(on_host, use_local_synchronization=alone)
        made = one if host == mine else made
    assert made is not None
    return made


# torch.load(..., weights_only=True) then takes a pickled state: numbers only.
torch.serialization.add_safe_globals([PostLocalSGDState])


def _launch_local_sgd(state: PostLocalSGDState, bucket: GradBucket, wires: Wires) -> BucketFuture:
    if not isinstance(state, PostLocalSGDState):
        raise TypeError(
            f"post_localSGD_hook takes a commhooks.PostLocalSGDState as state, got "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state._launch(bucket, wires)


@classic_hook(_launch_local_sgd)
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket over all ranks in the first steps, over a subgroup or not at all later.

    Example:
        >>> state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, post_localSGD_hook)
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> averager.average_parameters(ddp_model.parameters())  # after each optimizer.step()
    """
    return _launch_local_sgd(state, bucket, ())
