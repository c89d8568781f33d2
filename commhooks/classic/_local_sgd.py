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

from commhooks.checkpoint._format import MAX_STEP, check_fields, check_numbers
from commhooks.classic._hook_access import group_of
from commhooks.classic._hooked_model import Group, HookedModel, hooked_model
from commhooks.classic._launch import BucketFuture, WireDtypes, cast_payloads, classic_hook
from commhooks.core._dense import Dense
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.schemes.noop import Noop
from ddp_core import make_with_timeout

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
            found in the first local step.
        start_localSGD_iter: number of first steps, which average over ``process_group``.
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
        "_had_subgroup",
        "_initial_iter",
        "_iters",
        "_own_subgroup",
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
        self._initial_iter = 0
        self._own_subgroup: Group = None  # made by this state, since none was given
        self._had_subgroup = False  # whether this is an unpickled state that was given a subgroup
        # By model: a state may be registered on several, each of which makes its own steps.
        self._iters: weakref.WeakKeyDictionary[HookedModel, int] = weakref.WeakKeyDictionary()

    @property
    def iter(self) -> int:
        """Returns the number of global steps so far; local steps are not counted."""
        return max(self._iters.values(), default=self._initial_iter)

    @iter.setter
    def iter(self, value: int) -> None:
        self._initial_iter = value
        self._iters.clear()

    def __getstate__(self) -> dict[str, Any]:
        # A subgroup of the ranks on this host is made again after unpickling; a group that the user
        # passed is not.
        given = self.subgroup is not None and self.subgroup is not self._own_subgroup
        return {
            "start_localSGD_iter": self.start_localSGD_iter,
            "post_local_gradient_allreduce": self.post_local_gradient_allreduce,
            "iter": self.iter,
            "had_subgroup": given or self._had_subgroup,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        # ``torch.load`` calls this with whatever a file holds, so all of it is checked first.
        flags = ("post_local_gradient_allreduce", "had_subgroup")
        check_fields(saved, ("start_localSGD_iter", "iter", *flags), _PICKLE)
        ranges = {"start_localSGD_iter": (-MAX_STEP, MAX_STEP), "iter": (0, MAX_STEP)}
        check_numbers(saved, ranges, _PICKLE)
        if not all(type(saved[flag]) is bool for flag in flags):
            raise CheckpointError(f"{_PICKLE} is damaged: {' and '.join(flags)} are True or False")
        start, allreduce = saved["start_localSGD_iter"], saved["post_local_gradient_allreduce"]
        self.__init__(None, None, start, allreduce)  # type: ignore[misc]
        self.iter = saved["iter"]
        self._had_subgroup = saved["had_subgroup"]

    def _check_subgroup(self) -> None:
        if self._had_subgroup:
            raise RegistrationError(
                "PostLocalSGDState: the state that was pickled had a subgroup, which a pickle does "
                "not hold: set state.subgroup on every rank before training continues"
            )

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts a step at its last bucket, for user-written hooks that take this state.

        The hooks of this package count steps themselves, and this method does nothing for them.
        """
        if bucket.is_last() and not self._iters:
            self._initial_iter += 1

    def _launch(self, bucket: GradBucket, wire_dtypes: WireDtypes) -> BucketFuture:
        model = hooked_model(bucket.parameters())
        if model not in self._iters:
            # A model that was wrapped again, with more trained parameters, continues its count.
            counts = [count for earlier, count in self._iters.items() if model.extends(earlier)]
            self._iters[model] = max(counts, default=self._initial_iter)
        step = self._iters[model]
        group, scheme = self.process_group, cast_payloads(DENSE, wire_dtypes)
        if step < self.start_localSGD_iter:
            if bucket.is_last():
                self._iters[model] = step + 1
        elif not self.post_local_gradient_allreduce:
            scheme = NOOP
        else:
            if self.subgroup is None:
                self._check_subgroup()
                hook = model.hook(scheme, group, bucket)
                with hook.target.on_device():
                    self.subgroup = self._own_subgroup = _same_host_group(group_of(hook))
            group = self.subgroup
        return model.hook(scheme, group, bucket).start(bucket)


def _same_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes a group of the ranks of ``group`` on this host; all ranks of ``group`` call this."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    ranks = dist.get_process_group_ranks(group)
    # All ranks of the job have to call new_group for every group, in the same order. Where some of
    # them are not in ``group``, the members of each host make only their own group, with
    # use_local_synchronization. The name of such a group depends on how many groups a rank has,
    # which may differ between ranks, so this is the second choice.
    is_subset = len(ranks) != dist.get_world_size()
    this_host = hosts[group.rank()]
    subgroup: dist.ProcessGroup | None = None
    for host in [this_host] if is_subset else sorted(set(hosts)):
        on_host = [rank for rank, rank_host in zip(ranks, hosts, strict=True) if rank_host == host]
        make = partial(dist.new_group, on_host, use_local_synchronization=is_subset)
        host_group: dist.ProcessGroup = make_with_timeout(group, make)
        subgroup = host_group if host == this_host else subgroup
    assert subgroup is not None
    return subgroup


# So that torch.load(..., weights_only=True) loads a pickled state, which holds numbers only.
torch.serialization.add_safe_globals([PostLocalSGDState])


def _launch_local_sgd(
    state: PostLocalSGDState, bucket: GradBucket, wire_dtypes: WireDtypes
) -> BucketFuture:
    if not isinstance(state, PostLocalSGDState):
        raise TypeError(
            f"post_localSGD_hook takes a commhooks.PostLocalSGDState as state, got "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state._launch(bucket, wire_dtypes)


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
