"""Decides which parameters share a bucket, and when buckets are laid out anew."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ddp_core.reducer._parameters import Trained

__all__ = [
    "BucketCaps",
    "BucketGroup",
    "BucketPlan",
    "CompilerSplits",
    "SavedBuckets",
    "Stage",
    "agree_on",
    "arrange",
    "assign_buckets",
    "kinds_of",
]


class Stage(enum.Enum):
    """Describes how final the buckets of a model are."""

    NEW = enum.auto()  # there was no step yet
    FIRST = enum.auto()  # by registration, until the order of gradients is known
    FINAL = enum.auto()  # they stay, unless other sizes or groups are asked for


@dataclass(frozen=True)
class SavedBuckets:
    """Holds the buckets of a saved run, with which this run resumes.

    ====================  ====================================================
    members, limits       buckets laid out by arrival, or that stay as they are
    members, no limits    buckets of the first step
    no members, limits    buckets were to be laid out anew
    neither               there was no step yet
    ====================  ====================================================

    Attributes:
        members: indices of the parameters of each bucket, without those of sparse gradients.
        limits: the sizes, in bytes, at which that run's buckets are full.
        arrival: indices of all parameters, in the order in which their gradients arrived in that
            run's last step; empty if it is unknown.
    """

    members: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    arrival: tuple[int, ...]

    @property
    def stage(self) -> Stage:
        """Returns the saved run's stage; FIRST if its buckets were to be laid out anew."""
        if self.members and self.limits:
            return Stage.FINAL
        return Stage.FIRST if self.members or self.limits else Stage.NEW

    def holds(self, parameters: Sequence[Trained], group_of: BucketGroup | None) -> bool:
        """Whether these buckets hold exactly the model's parameters, and each bucket one kind."""
        dense = [index for index, parameter in enumerate(parameters) if not parameter.sparse]
        if sorted(index for indices in self.members for index in indices) != dense:
            return False
        kinds = kinds_of(parameters, group_of)
        return all(len({kinds[index] for index in indices}) == 1 for indices in self.members)

    def with_sparse(self, parameters: Sequence[Trained]) -> list[list[int]]:
        """Returns these buckets, and those of the model's sparse gradients."""
        sparse = [[index] for index, parameter in enumerate(parameters) if parameter.sparse]
        return [*map(list, self.members), *sparse]


class Saving(NamedTuple):
    """Holds the buckets of a checkpoint; :class:`SavedBuckets` explains each field."""

    members: Sequence[Sequence[int]]
    limits: tuple[int, ...]
    arrival: list[int]


class BucketPlan:
    """Decides on buckets: by registration, by arrival, by the compiler, or as a scheme requests.

    Args:
        parameters: of the model; the same on all ranks.
        caps: sizes of buckets.
        group, device: for the message by which ranks agree.

    Attributes:
        follows_arrival: whether buckets are laid out by arrival once the order of gradients is
            known; otherwise the first buckets, by registration, stay.
        static_graph: the first step only records what later steps repeat.
        stage: of the buckets, here or in the run that this one resumes.
        arrival: the order of gradients in the last complete step; empty if it is unknown.
        group_of: the layout that a scheme requested.
        splits: the compiler's splits.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        caps: BucketCaps,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._parameters, self.caps = parameters, caps
        self._group, self._device = group, device
        self.follows_arrival, self.static_graph = True, False
        self.stage = Stage.NEW
        self.arrival: list[int] = []
        self.group_of: BucketGroup | None = None
        self._order: list[int] = []  # by which the buckets were laid out; none: by registration
        self._steps = 0  # that have ended here
        self.splits = CompilerSplits(parameters)
        # Changes that are pending until the next step begins:
        self._anew = False  # lay out anew, for other sizes or groups
        self._saved: SavedBuckets | None = None  # take up another run's, unless laid out anew

    @property
    def loaded(self) -> bool:
        """Whether a saved run's buckets are to be used when the next step begins."""
        return self._saved is not None

    @property
    def settled(self) -> bool:
        """Whether the order of gradients can no longer change the buckets."""
        return self.stage is Stage.FINAL or not self.follows_arrival

    @property
    def rebuilt(self) -> bool:
        """Whether buckets were laid out by arrival, here or in the run that was saved."""
        return self.stage is Stage.FINAL and self.follows_arrival

    def initial(self) -> list[list[int]]:
        """Returns the buckets of the first step."""
        limits = self.caps.initial(rebuilds=self.follows_arrival)
        return arrange(self._parameters, limits)

    def request(self, group_of: BucketGroup | None, caps: BucketCaps | None = None) -> None:
        """Puts only parameters of one group into a bucket, from the next step on; None: any.

        Args:
            caps: other sizes of buckets, if given.
        """
        other_groups = group_of is not None or self.group_of is not None
        other_caps = caps is not None and caps != self.caps
        # Buckets that are not settled will be laid out soon in any case, with these sizes.
        if other_groups or (other_caps and self.settled):
            self._anew = True
        self.group_of = group_of
        self.caps = caps or self.caps

    def resume(self, saved: SavedBuckets) -> None:
        """Uses a saved run's buckets when the next step begins; all ranks call it.

        If saved buckets do not suit this model (its parameters, its sizes of buckets, the layout
        that a scheme requests), buckets follow that run's order of arrival, if it is known.
        """
        self._saved, self._anew = saved, not saved.members
        self.stage = saved.stage
        complete = sorted(saved.arrival) == list(range(len(self._parameters)))
        self.arrival = list(saved.arrival) if complete else []

    def to_save(self, present: Sequence[Sequence[int]]) -> Saving:
        """Returns the buckets that a resumed run needs.

        Args:
            present: indices of the parameters of each present dense bucket.
        """
        if self.stage is Stage.NEW:
            return Saving((), (), self.arrival)
        if self._anew:
            return Saving((), self.caps.limits, self.arrival)
        if self._saved is not None:
            return Saving(self._saved.members, self._saved.limits, self.arrival)
        if self.splits.open and self.settled and self.splits.buckets:
            # The compiler's buckets come with the next step.
            return Saving((), self.caps.limits, self._order or self.arrival)
        return Saving(present, self.caps.limits if self.settled else (), self.arrival)

    def step_ended(self, order: list[int] | None) -> None:
        """Records a complete step.

        Args:
            order: in which gradients arrived; None on a rank without inputs (join), which uses the
                order of registration unless it knows another.
        """
        learns_only = self.static_graph and self.stage is Stage.NEW  # as in PyTorch
        order = (self.arrival or list(range(len(self._parameters)))) if order is None else order
        if len(order) == len(self._parameters) and not learns_only:
            self.arrival = order
        if self.stage is Stage.NEW:
            self.stage = Stage.FIRST if self.follows_arrival else Stage.FINAL
        self._steps += 1

    def add_splits(self, chosen: Sequence[Sequence[int]]) -> None:
        """Adds the compiler's splits of a graph, which become buckets when they are rebuilt.

        Only in the first step: one rank's later recompilation must not move buckets.

        Args:
            chosen: ids of the parameters of each split, in the order of backward.
        """
        if not self._steps:
            self.splits.take(chosen)

    def rebuild(self, present: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """Returns new buckets if they are due; all ranks call it in the same forward pass.

        All ranks use rank 0's buckets, since gradients may arrive in another order on each rank.

        Args:
            present: indices of the parameters of each present bucket.
        """
        if not (self._change_pending or self._by_arrival or self._for_splits):
            return None
        saved = self._usable_saved()
        if saved is None:
            order, buckets = self._laid_out(present)
            final = bool(self.arrival) or not self.follows_arrival
        else:
            order, buckets = self.arrival, saved.with_sparse(self._parameters)
            final = saved.stage is Stage.FINAL
        agreed, final = agree_on(buckets, final, self._group, self._device)
        if final or self.stage is not Stage.NEW:
            self.stage = Stage.FINAL if final else Stage.FIRST
        self._anew, self._saved, self._order = False, None, order
        split = saved is not None and final  # by the compiler of the run that was saved
        self.splits.open = self._steps == 0 and not split
        return agreed

    @property
    def _change_pending(self) -> bool:
        """Whether a change is pending: other sizes, other groups, or a saved run's buckets."""
        return self._anew or self._saved is not None

    @property
    def _by_arrival(self) -> bool:
        """Whether the order of gradients has become known, so that buckets follow it."""
        return not self.settled and bool(self.arrival)

    @property
    def _for_splits(self) -> bool:
        """Whether this is the second step, in which ranks agree on the compiler's buckets."""
        return self.settled and self.splits.open and self._steps > 0

    def _laid_out(self, present: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
        """Returns new buckets, and the order of gradients that they follow."""
        if self._change_pending or self._by_arrival:
            return self.arrival, self._arranged(self.arrival)
        order = self._order or self.arrival  # the splits are all that is new
        if not self.splits.buckets:
            return order, [list(indices) for indices in present]
        return order, self._arranged(order)

    def _usable_saved(self) -> SavedBuckets | None:
        """Returns the saved buckets if they suit the model."""
        saved = self._saved
        if saved is None or self._anew or not saved.holds(self._parameters, self.group_of):
            return None
        if saved.limits == self.caps.limits:
            return saved
        until_arrival = saved.stage is Stage.FIRST and self.follows_arrival and not self.arrival
        return saved if until_arrival else None

    def _arranged(self, order: list[int]) -> list[list[int]]:
        limits = self.caps.limits
        if not order:
            limits = self.caps.initial(rebuilds=self.follows_arrival)
        splits = [] if self.group_of is not None else self.splits.buckets
        return arrange(
            self._parameters, limits, order=order or None, group_of=self.group_of, splits=splits
        )


# ---- which parameters share a bucket


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
        free: whether the user has set no size, so that a hook may.
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
        """Returns the sizes that a hook requests (None: any), unless the user has set sizes."""
        if not self.free or cap_mb is None:
            return self
        return replace(self, limits=(FIRST_BUCKET_NBYTES, _nbytes(cap_mb)))

    @property
    def cap(self) -> int:
        """Returns the largest size."""
        return max(self.limits)

    def initial(self, *, rebuilds: bool) -> tuple[int, ...]:
        """Returns the sizes that hold in the first step.

        If buckets are rebuilt after the first step, one bucket holds everything until then: the
        order in which parameters are used is not known yet, and a bucket that waits for a late
        parameter could be launched amid other collectives of the backward pass.
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
    nbytes = [entry.parameter.numel() * entry.parameter.element_size() for entry in parameters]
    alone = [entry.sparse for entry in parameters]
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
    kinds: list[Any] = [(entry.parameter.dtype, entry.parameter.device) for entry in parameters]
    if group_of is None:
        return kinds
    groups = [group_of(entry.name, entry.parameter) for entry in parameters]
    return [(*kind, group) for kind, group in zip(kinds, groups, strict=True)]


def agree_on(
    buckets: Sequence[Sequence[int]], final: bool, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[list[int]], bool]:
    """Returns rank 0's answers on every rank; ranks may have seen gradients in different orders.

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


# ---- buckets that a compiler has chosen


class CompilerSplits:
    """Holds the splits of all graphs that were compiled in the first step's forward pass.

    Only ranks with inputs compile, so all ranks agree once, in the second step, whether there are
    any splits.

    Args:
        parameters: of the model; the same on all ranks.

    Attributes:
        buckets: indices of the parameters of each split, in the order of backward.
        open: whether the ranks still have to agree on the splits.
        ignored: whether splits are ignored.
    """

    def __init__(self, parameters: Sequence[Trained]) -> None:
        self._index_of = {id(entry.parameter): index for index, entry in enumerate(parameters)}
        self.buckets: list[list[int]] = []
        self.open, self.ignored = True, False

    def take(self, chosen: Sequence[Sequence[int]]) -> None:
        """Adds the splits of one graph.

        Args:
            chosen: ids of the parameters of each split, in the order of backward.
        """
        if self.ignored:
            return
        index_of = self._index_of
        new = [[index_of[i] for i in split if i in index_of] for split in chosen]
        # Graphs are compiled in the order of forward, so a later one is earlier in backward. A
        # shared parameter is ready at its last use in backward.
        splits = [*new, *self.buckets]
        owner = {index: number for number, split in enumerate(splits) for index in split}
        disjoint = [
            [index for index in dict.fromkeys(split) if owner[index] == number]
            for number, split in enumerate(splits)
        ]
        self.buckets = [split for split in disjoint if split]
