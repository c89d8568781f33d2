"""``PostLocalSGDState`` and its hook.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import socket
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._launch import BucketFuture, Wires, cast_payloads, classic_hook
from commhooks.classic._owner import Group, Owner, owner_of
from commhooks.schemes.dense import Dense, Noop

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

DENSE, NOOP = Dense(), Noop()


class PostLocalSGDState:
    """Settings of ``post_localSGD_hook``: a global average first, later one in subgroups only.

    Use it with a model averager, e.g. torch's ``PeriodicModelAverager``, which averages the
    parameters globally every so many steps.

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
        self._iters: weakref.WeakKeyDictionary[Owner, int] = weakref.WeakKeyDictionary()

    @property
    def iter(self) -> int:
        """Global steps so far; it stops counting at ``start_localSGD_iter``."""
        return max(self._iters.values(), default=self._first_iter)

    @iter.setter
    def iter(self, value: int) -> None:
        self._first_iter = value
        self._iters.clear()

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
                whole = owner.hook(scheme, group, bucket)._group()
                self.subgroup = _same_host_group(whole)
            group = self.subgroup
        return owner.hook(scheme, group, bucket).launch(bucket)


def _same_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks of ``group`` on this host; all ranks of ``group`` call it together."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    ranks = dist.get_process_group_ranks(group)
    mine = [rank for rank, host in zip(ranks, hosts, strict=True) if host == hosts[group.rank()]]
    made: dist.ProcessGroup = dist.new_group(mine, use_local_synchronization=True)
    return made


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
