"""Which parameters share a bucket, and in which order buckets are launched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_core.reducer.parameters import Trained

__all__ = ["BucketCaps", "BucketGroup", "agree_on", "arrange", "assign_buckets", "kinds_of"]

MiB = 1024 * 1024
# torch's own: small enough to start communication early, large enough to be worth a message.
FIRST_BUCKET_NBYTES = 1 * MiB
DEFAULT_CAP_MB = 25
# Over Ethernet the line is idle until the first full bucket, and a Gloo message costs 0.3 ms: see
# docs/design/reducer.md for what was measured.
DEFAULT_CAP_MB_CPU = 8

# Parameters for which it gives different answers never share a bucket.
BucketGroup = Callable[[str, nn.Parameter], Hashable]


@dataclass(frozen=True)
class BucketCaps:
    """Holds the sizes, in bytes, at which buckets are full.

    Attributes:
        limits: of the first, second, ... bucket; the last one holds for all that follow.
        explicit: given bucket by bucket (``bucket_cap_mb_list``), hence also before the first step.
        free: the user has not asked for any; a hook may.
    """

    limits: tuple[int, ...]
    explicit: bool = False
    free: bool = False

    @classmethod
    def of(
        cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None, device_type: str
    ) -> BucketCaps:
        """Makes sizes from the constructor arguments of DistributedDataParallel."""
        if cap_mb_list:
            return cls(tuple(map(_nbytes, cap_mb_list)), explicit=True)
        if cap_mb is not None:
            return cls((_nbytes(cap_mb),))
        default = DEFAULT_CAP_MB_CPU if device_type == "cpu" else DEFAULT_CAP_MB
        return cls((FIRST_BUCKET_NBYTES, default * MiB), free=True)

    def for_hook(self, cap_mb: float | None) -> BucketCaps:
        """Returns the sizes that a hook asks for (None: any), where the user has asked for none."""
        if not self.free or cap_mb is None:
            return self
        return replace(self, limits=(FIRST_BUCKET_NBYTES, _nbytes(cap_mb)))

    @property
    def cap(self) -> int:
        """Returns the largest size."""
        return max(self.limits)

    def initial(self, *, rebuilds: bool) -> tuple[int, ...]:
        """Returns the sizes that hold in the first step.

        Where buckets are rebuilt after it, one bucket holds everything: the order in which
        parameters are used is not known yet, and a bucket that waits for a late parameter could
        be launched amid other collectives of the backward pass.
        """
        if self.explicit or not rebuilds:
            return self.limits
        return (sys.maxsize,)


def _nbytes(cap_mb: float) -> int:
    return int(min(cap_mb * MiB, sys.maxsize))


def assign_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    limits: Sequence[int],
    *,
    alone: Sequence[bool],
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """Returns the indices of the parameters of each bucket; the same as torch's class.

    A parameter goes to the open bucket of its kind; a bucket that reaches its limit is closed.

    Args:
        nbytes, kinds, alone: by parameter. Parameters of different kinds (dtype, device, ...)
            never share a bucket; one that is ``alone`` (sparse) has its own.
        limits: of a kind's first, second, ... bucket; the last holds for all that follow.
        order: in which the parameters are taken; their own order by default.
    """
    opened: dict[Hashable, list[int]] = {}
    fill: dict[Hashable, int] = {}
    number: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for index in range(len(nbytes)) if order is None else order:
        if alone[index]:
            closed.append([index])
            continue
        kind = kinds[index]
        opened.setdefault(kind, []).append(index)
        fill[kind] = fill.get(kind, 0) + nbytes[index]
        position = number.get(kind, 0)
        if fill[kind] >= limits[min(position, len(limits) - 1)]:
            closed.append(opened.pop(kind))
            fill[kind], number[kind] = 0, position + 1
    if order is None:
        return sorted([*closed, *opened.values()], key=min)
    # A bucket is complete when its last parameter is.
    place = {index: position for position, index in enumerate(order)}
    leftover = sorted(opened.values(), key=lambda bucket: max(place[index] for index in bucket))
    return [*closed, *leftover]


def arrange(
    parameters: Sequence[Trained],
    limits: Sequence[int],
    *,
    order: Sequence[int] | None = None,
    group_of: BucketGroup | None = None,
    splits: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Returns buckets in launch order.

    Args:
        order: in which gradients arrived; None (not known yet): reverse registration order.
        group_of: what a scheme asks for, on top of dtype and device.
        splits: parameters that are buckets whatever their size (the compiler chose them).
    """
    kinds = kinds_of(parameters, group_of)
    nbytes = [one.parameter.numel() * one.parameter.element_size() for one in parameters]
    alone = [one.sparse for one in parameters]
    chosen = {index for split in splits for index in split}
    everything = range(len(parameters)) if order is None else order
    rest = [index for index in everything if index not in chosen] if chosen else order
    buckets = assign_buckets(nbytes, kinds, limits, alone=alone, order=rest)
    for split in splits:  # of one dtype and device each
        buckets += assign_buckets(nbytes, kinds, [sys.maxsize], alone=alone, order=split)
    if order is None and not splits:
        return buckets[::-1]
    if group_of is not None or splits:  # they interleave: launch what is complete first
        place = {index: position for position, index in enumerate(everything)}
        last_first = order is None
        buckets.sort(
            key=lambda bucket: (min if last_first else max)(place[index] for index in bucket),
            reverse=last_first,
        )
    return buckets


def kinds_of(parameters: Sequence[Trained], group_of: BucketGroup | None) -> list[Hashable]:
    """Returns the kind of each parameter; those of different kinds never share a bucket."""
    kinds: list[Any] = [(one.parameter.dtype, one.parameter.device) for one in parameters]
    if group_of is None:
        return kinds
    groups = [group_of(one.name, one.parameter) for one in parameters]
    return [(*kind, group) for kind, group in zip(kinds, groups, strict=True)]


def agree_on(
    buckets: Sequence[Sequence[int]], final: bool, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[list[int]], bool]:
    """Returns rank 0's answers, on every rank; ranks may have seen gradients come differently.

    Args:
        final: whether these buckets stay.
    """
    indices = [index for bucket in buckets for index in bucket]
    owners = [number for number, bucket in enumerate(buckets) for _ in bucket]
    message = torch.tensor([*indices, *owners, final], dtype=torch.int64, device=device)
    dist.broadcast(message, group=group, group_src=0)
    *both, stays = message.tolist()
    agreed: list[list[int]] = [[] for _ in range(both[-1] + 1)]
    for index, number in zip(both[: len(indices)], both[len(indices) :], strict=True):
        agreed[number].append(index)
    return agreed, bool(stays)
