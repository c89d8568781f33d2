"""Defines ``PostLocalSGDState`` and its hook.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import socket
import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.checkpoint._form import MAX_STEP, check_fields, check_numbers
from commhooks.classic._hook_access import group_of
from commhooks.classic._launch import BucketFuture, Wires, cast_payloads, classic_hook
from commhooks.classic._owner import Group, Owner, owner_of
from commhooks.core._dense import Dense
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.schemes.noop import Noop
from ddp_core import made_in_time

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

DENSE, NOOP = Dense(), Noop()
_PICKLE = "the pickled PostLocalSGDState"


class PostLocalSGDState:
    """Holds the settings of ``post_localSGD_hook``: global averages first, then subgroups.

    Needs a model averager, such as torch's ``PeriodicModelAverager``, which averages the parameters
    over all ranks every few steps.

    A pickled or copied state keeps its step count, but no process groups. A state that was given a
    ``subgroup`` needs it again before its first local step.

    Args:
        process_group: ranks of the first steps. None: the ranks of the model.
        subgroup: ranks of the later steps. None: the ranks of ``process_group`` on the same host,
            which are determined in the first local step.
        start_localSGD_iter: number of global steps at the start.
        post_local_gradient_allreduce: averages in the subgroup in later steps; False: gradients
            stay local.

    Example:
        >>> state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, post_localSGD_hook)

    Reference: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2020.
    """

    # As in torch: assigning to a setting with a wrong name is an error.
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
        self._settled: Group = None  # the subgroup that was made here, since none was given
        self._lacks_subgroup = False  # whether the state that was pickled was given a subgroup
        # By model: a state may be registered on several, each of which makes its own steps.
        self._iters: weakref.WeakKeyDictionary[Owner, int] = weakref.WeakKeyDictionary()

    @property
    def iter(self) -> int:
        """Returns the number of global steps so far; local steps are not counted."""
        return max(self._iters.values(), default=self._first_iter)

    @iter.setter
    def iter(self, value: int) -> None:
        self._first_iter = value
        self._iters.clear()

    def __getstate__(self) -> dict[str, Any]:
        # A group of the ranks on one host is made again; only the user can make any other.
        given = self.subgroup is not None and self.subgroup is not self._settled
        return {
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
            "iter": self.iter,
            "had_subgroup": given or self._lacks_subgroup,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        # ``torch.load`` calls this with whatever a file says, so all of it is checked first.
        flags = ("post_local_gradient_allreduce", "had_subgroup")
        check_fields(saved, ("start_localSGD_iter", "iter", *flags), _PICKLE)
        whole = {"start_localSGD_iter": (-MAX_STEP, MAX_STEP), "iter": (0, MAX_STEP)}
        check_numbers(saved, whole, _PICKLE)
        if not all(type(saved[flag]) is bool for flag in flags):
            raise CheckpointError(f"{_PICKLE} is damaged: {' and '.join(flags)} are True or False")
        start, allreduce = saved["start_localSGD_iter"], saved["post_local_gradient_allreduce"]
        self.__init__(None, None, start, allreduce)  # type: ignore[misc]
        self.iter = saved["iter"]
        self._lacks_subgroup = saved["had_subgroup"]

    def _check_subgroup(self) -> None:
        if self._lacks_subgroup:
            raise RegistrationError(
                "PostLocalSGDState: the state that was pickled had a subgroup, which a pickle does "
                "not hold: set state.subgroup on every rank before training continues"
            )

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts a step at its last bucket, for user-written hooks that take this state.

        The hooks of this package count steps themselves, and this method does nothing for them.
        """
        if bucket.is_last() and not self._iters:
            self._first_iter += 1

    def _launch(self, bucket: GradBucket, wires: Wires) -> BucketFuture:
        owner = owner_of(bucket.parameters())
        if owner not in self._iters:
            # A model that was wrapped again with more trained parameters continues its count.
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
    """Makes a group of the ranks of ``group`` on this host; all ranks of ``group`` call this."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    ranks = dist.get_process_group_ranks(group)
    # All ranks of the job have to call new_group for every group, in the same order. If some are
    # not in ``group``, members make their own group only, by use_local_synchronization; its name
    # then depends on how many groups a rank has, which may differ, so it is the second choice.
    alone = len(ranks) != dist.get_world_size()
    this_host = hosts[group.rank()]
    made: dist.ProcessGroup | None = None
    for host in [this_host] if alone else sorted(set(hosts)):
        on_host = [rank for rank, other in zip(ranks, hosts, strict=True) if other == host]
        make = partial(dist.new_group, on_host, use_local_synchronization=alone)
        group_of_host: dist.ProcessGroup = made_in_time(group, make)
        made = group_of_host if host == this_host else made
    assert made is not None
    return made


# torch.load(..., weights_only=True) then loads a pickled state, which has numbers only.
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
    """Averages a bucket over all ranks in the first steps, later over a subgroup or not at all.

    Example:
        >>> state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, post_localSGD_hook)
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> averager.average_parameters(ddp_model.parameters())  # after each optimizer.step()
    """
    return _launch_local_sgd(state, bucket, ())
