"""ZeroRedundancyOptimizer's step, bucket by bucket, while gradients are averaged.

torch's hooks of these names wait and start collectives wherever a bucket happens to be ready, and
so refuse Gloo, where ranks would start them in different orders. Here the reducer finishes buckets
in one order on all ranks, and the parameters travel in a process group of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torchs

from ddp_core._torch import assigned, foreach_copy, overlaps, step_shard
from ddp_core.ddp.ddp import DistributedDataParallel
from ddp_core.exchange.lane_groups import LaneGroup, borrow, made_in_time
from ddp_core.reducer.held import HeldBucket
from ddp_core.reducer.launch import CommHook, Launcher
from ddp_core.reducer.layout import arrange
from ddp_core.reducer.reducer import Reducer

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: CommHook, ddp: Any, zero: Any, shard_buckets: bool = False
) -> CommHook:
    """Returns ``hook``, after which each rank steps its parameters and sends them to the others.

    Buckets are stepped at the end of backward, in order, while later ones still travel. All ranks
    call this alike. With torch's DistributedDataParallel it is torch's function.

    Args:
        zero: a ``ZeroRedundancyOptimizer`` with ``overlap_with_ddp=True`` of the same parameters;
            its ``step`` is not called.
        shard_buckets: a rank may own a part of a bucket, so that ranks own about as much each.

    Raises:
        ValueError: ``zero`` was made without ``overlap_with_ddp=True``, or for other ranks.

    Example:
        >>> zero = ZeroRedundancyOptimizer(
        ...     model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-3
        ... )
        >>> model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, zero))
    """
    if not isinstance(ddp, DistributedDataParallel):
        return torchs.hook_with_zero_step(hook, ddp, zero, shard_buckets)
    return _overlapped(hook, ddp, zero, shard_buckets, early=False)


def hook_with_zero_step_interleaved(
    hook: CommHook, ddp: Any, zero: Any, shard_buckets: bool = False
) -> CommHook:
    """Returns ``hook`` as :func:`hook_with_zero_step` does, but steps buckets during backward."""
    if not isinstance(ddp, DistributedDataParallel):
        return torchs.hook_with_zero_step_interleaved(hook, ddp, zero, shard_buckets)
    return _overlapped(hook, ddp, zero, shard_buckets, early=True)


def _overlapped(
    hook: CommHook, ddp: DistributedDataParallel, zero: Any, shard_buckets: bool, *, early: bool
) -> CommHook:
    if not overlaps(zero):
        raise ValueError(
            "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this "
            "hook properly"
        )
    ranks = dist.get_process_group_ranks(zero.process_group)
    if ranks != dist.get_process_group_ranks(ddp.process_group) or zero.rank != zero.global_rank:
        raise ValueError(
            f"hook_with_zero_step: the optimizer and the model need the same ranks, counted from "
            f"0 as all ranks are (ZeroRedundancyOptimizer assigns parameters by global rank); got "
            f"{ranks} and {dist.get_process_group_ranks(ddp.process_group)}"
        )
    # A rank without inputs would have to send its parameters, too: `join` is refused.
    steps = _ZeroSteps(zero, shard_buckets, ddp.device, early=early)
    ddp._parts.uneven.overlaps_zero = True
    model = weakref.ref(ddp)  # which holds the hook

    def hook_with_zero(state: Any, bucket: Any) -> Any:
        ddp = model()
        assert ddp is not None  # its reducer calls
        steps.attach(ddp.reducer, bucket.index())
        return hook(state, bucket)

    hook_with_zero.__qualname__ = f"hook_with_zero_step.{getattr(hook, '__qualname__', 'hook')}"
    return hook_with_zero


class _Sent(NamedTuple):
    """Parameters of one owner that travel."""

    work: dist.Work
    flat: Tensor
    parameters: list[Tensor]
    owner: int


class _ZeroSteps:
    """Steps this rank's parameters of each averaged bucket; parameters travel from their owners.

    Args:
        early: see :class:`ddp_core.reducer.optimizer.StepsInBackward`.
    """

    def __init__(
        self, zero: Any, shard_buckets: bool, device: torch.device, *, early: bool
    ) -> None:
        self.early = early
        self._zero, self._shard_buckets = zero, shard_buckets
        self._reducer: weakref.ref[Reducer] | None = None
        self._launched: set[int] = set()  # buckets that went through the hook in this step
        self._owner: dict[Tensor, int] = {}
        self._place: dict[Tensor, int] = {}  # of this rank's parameters, in its local optimizer
        self._under_way: list[_Sent] = []
        self._group, release = _own_group(zero.process_group, device)
        weakref.finalize(self, release)

    def attach(self, reducer: Reducer, number: int) -> None:
        """Bucket ``number`` is launched; the reducer will say when it is averaged."""
        before = reducer.in_flight.optimizer
        if before is not self:
            if before is not None and not isinstance(before, _ZeroSteps):
                raise RuntimeError(
                    "hook_with_zero_step: parameters of this model have optimizers in backward "
                    "already (_apply_optimizer_in_backward); use one of both"
                )
            reducer.in_flight.optimizer, self._reducer = self, weakref.ref(reducer)
        self._launched.add(number)

    def bucket_averaged(self, bucket: HeldBucket) -> None:
        if bucket.number not in self._launched:  # by another hook
            return
        self._launched.discard(bucket.number)
        if not self._owner:
            self._assign()
        with torch.no_grad():
            self._step(bucket.parameters)
            # In one order on all ranks, whoever owns what.
            for owner in sorted({self._owner[one] for one in bucket.parameters}):
                mine = [one for one in bucket.parameters if self._owner[one] == owner]
                self._send([_real(one) for one in mine], owner)

    def all_averaged(self) -> None:
        launcher = self._launcher()
        under_way, self._under_way = self._under_way, []
        with torch.no_grad():
            for sent in under_way:
                launcher.await_work(sent.work, sent.flat.device)
                if sent.owner != self._zero.rank:
                    sizes = [parameter.numel() for parameter in sent.parameters]
                    parts = zip(sent.flat.split(sizes), sent.parameters, strict=True)
                    values = [part.view(parameter.shape) for part, parameter in parts]
                    foreach_copy(sent.parameters, values)

    def _launcher(self) -> Launcher:
        reducer = None if self._reducer is None else self._reducer()
        assert reducer is not None  # it calls
        return reducer.launcher

    def _assign(self) -> None:
        """Gives every parameter an owner, by the buckets that there would be without arrival.

        The same on all ranks, before the first step; later buckets may be others.
        """
        for rank, assignments in enumerate(assigned(self._zero, self._describe_buckets)):
            for assignment in assignments.values():
                self._owner.update(dict.fromkeys(assignment.parameters, rank))
        local = self._zero.optim.param_groups[0]["params"]
        self._place = {parameter: place for place, parameter in enumerate(local)}

    def _describe_buckets(self, info: Any) -> None:
        reducer = None if self._reducer is None else self._reducer()
        assert reducer is not None
        trained = reducer.parameters
        units = arrange(trained, reducer.plan.caps.limits)
        info.params_per_bucket = [[trained[i].parameter for i in unit] for unit in units]
        info.shard_buckets = self._shard_buckets
        info.total_size = sum(one.parameter.numel() for one in trained)

    def _step(self, parameters: list[Any]) -> None:
        """Steps those that are this rank's; one without a gradient stays as it is."""
        gradients: list[Tensor | None] = [None] * len(self._place)
        for parameter in parameters:
            if parameter in self._place:
                gradients[self._place[parameter]] = parameter.grad
        if any(gradient is not None for gradient in gradients):
            self._follow_schedule()
            step_shard(self._zero, gradients)

    def _follow_schedule(self) -> None:
        """The functional optimizer reads its defaults; schedulers write to the groups."""
        defaults = getattr(self._zero.optim, "defaults", {})
        group = self._zero.param_groups[0]
        defaults.update({name: group[name] for name in defaults if name in group})
        if "betas" in group and "beta1" in defaults:
            defaults["beta1"], defaults["beta2"] = group["betas"]

    def _send(self, parameters: list[Tensor], owner: int) -> None:
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        work: Any = dist.broadcast(flat, group=self._group, group_src=owner, async_op=True)
        self._under_way.append(_Sent(work, flat, parameters, owner))


def _real(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return torch.view_as_real(value) if value.is_complex() else value


def _own_group(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[dist.ProcessGroup, Callable[[], None]]:
    """A group of the same ranks whose collectives nobody else starts, and how to let it go."""
    if device.type != "cpu":
        ranks = dist.get_process_group_ranks(group)
        own: Any = made_in_time(group, lambda: dist.new_group(ranks))
        return own, lambda: None
    (lent,) = borrow(group, 1)
    return lent.group, lambda: _let_go(lent)


def _let_go(lent: LaneGroup) -> None:
    lent.spoiled = True  # its collectives were not counted: nobody else may have it
    lent.give_back()
