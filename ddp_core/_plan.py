"""The bucket plan: which buckets there are now, and when they are laid out anew."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_core._layout import BucketCaps, BucketGroup, agree_on, arrange, kinds_of
from ddp_core._parameters import Trained

__all__ = ["BucketPlan", "SavedBuckets", "Stage"]


class Stage(enum.Enum):
    """How far a model's buckets have come."""

    NEW = enum.auto()  # laid out by registration; there was no step yet
    FIRST = enum.auto()  # the same after the first steps, until the order of gradients is known
    FINAL = enum.auto()  # laid out by arrival
    TAKEN_UP = enum.auto()  # another run's final ones


@dataclass(frozen=True)
class SavedBuckets:
    """The buckets of another run of the model, which a run that goes on takes up.

    Attributes:
        members: indices of the parameters of each bucket, those with sparse gradients left out;
            none: they were to be laid out anew, or there was no step yet.
        limits: the sizes, in bytes, at which that run's buckets are full; none: they were not final
            yet.
        arrival: indices of all parameters, in the order in which their gradients came in that
            run's last step; none: it is not known.
        agree: called before buckets are laid out; raises if not all ranks go on from the same
            state.
    """

    members: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    arrival: tuple[int, ...]
    agree: Callable[[], None]

    @property
    def stage(self) -> Stage:
        """Of the run that was saved; FIRST also where its buckets were to be laid out anew."""
        if self.members and self.limits:
            return Stage.FINAL
        return Stage.FIRST if self.members or self.limits or self.arrival else Stage.NEW


class BucketPlan:
    """Decides on buckets: by registration, then by arrival, by the compiler, or as a scheme asks.

    Args:
        parameters: of the model; the same on all ranks.
        caps: sizes of buckets.
        group, device: for the message by which ranks agree.

    Attributes:
        follows_arrival: whether buckets are laid out by arrival once the order of gradients is
            known; without, those by registration stay.
        static_graph: the first step only learns what comes in later ones.
        stage: of the buckets that there are now.
        arrival: the order of gradients in the last complete step; none: it is not known.
        group_of: the layout that a scheme asked for.
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
        self._splits: list[list[int]] = []  # the buckets that the compiler chose
        # What the next step begins with, if not with the buckets that there are:
        self._anew = False  # laid out anew, for other sizes, groups or splits
        self._saved: SavedBuckets | None = None  # another run's, unless they are laid out anew

    @property
    def rebuilt(self) -> bool:
        """By arrival, here or in the run that this one goes on from."""
        return self.follows_arrival and self.stage in (Stage.FINAL, Stage.TAKEN_UP)

    @property
    def _stay(self) -> bool:
        return self.rebuilt or not self.follows_arrival

    def initial(self) -> list[list[int]]:
        """Buckets of the first step."""
        limits = self.caps.initial(rebuilds=self.follows_arrival)
        return arrange(self._parameters, limits)

    def request(self, group_of: BucketGroup | None, caps: BucketCaps | None = None) -> None:
        """Buckets hold parameters of one group each from the next step on; None: as usual.

        Args:
            caps: other sizes of buckets, if given.
        """
        other_groups = group_of is not None or self.group_of is not None
        other_caps = caps is not None and caps != self.caps
        final = self._stay or (self._saved is not None and self._saved.stage is Stage.FINAL)
        if other_groups or (other_caps and final):  # without, they are laid out by arrival anyway
            self._anew = True
        self.group_of = group_of
        self.caps = caps or self.caps

    def go_on_from(self, saved: SavedBuckets) -> None:
        """Takes up another run's buckets when the next step begins; all ranks call it alike.

        Where those do not suit this model (its parameters, its sizes of buckets, the layout that a
        scheme asks for), buckets are laid out by that run's order of arrival, if it is known.
        """
        self._saved, self._anew = saved, not saved.members
        self.stage = Stage.NEW if saved.stage is Stage.NEW else Stage.FIRST  # until the next step
        complete = sorted(saved.arrival) == list(range(len(self._parameters)))
        self.arrival = list(saved.arrival) if complete else []

    def to_save(
        self, present: Sequence[Sequence[int]]
    ) -> tuple[Sequence[Sequence[int]], tuple[int, ...]]:
        """What another run is to go on from: ``members`` and ``limits`` of :class:`SavedBuckets`.

        Args:
            present: indices of the parameters of each dense bucket that there is now.
        """
        if self.stage is Stage.NEW:
            return (), ()
        if self._anew:
            return (), self.caps.limits
        if self._saved is not None:
            return self._saved.members, self._saved.limits
        return present, self.caps.limits if self._stay else ()

    def take_arrival(self, order: list[int]) -> None:
        """A step has ended, in which gradients came in this order."""
        learned = self.static_graph and self.stage is Stage.NEW  # PyTorch takes the second one's
        if len(order) == len(self._parameters) and not learned:
            self.arrival = order
        if self.stage is Stage.NEW:
            self.stage = Stage.FIRST

    def assume_arrival(self) -> None:
        """A step has ended on a rank that saw no gradients arrive (it has no input: join).

        It takes the order of registration, unless it knows one.
        """
        self.take_arrival(self.arrival or list(range(len(self._parameters))))

    def take_splits(self, chosen: Sequence[Sequence[int]], *, first_step: bool) -> None:
        """The compiler split a graph: its splits are the buckets when they are rebuilt.

        Args:
            chosen: ids of the parameters of each split, in the order of backward.
            first_step: one rank's later recompilation must not move buckets.
        """
        if not first_step:
            return
        index_of = {id(one.parameter): index for index, one in enumerate(self._parameters)}
        new = [[index_of[i] for i in split if i in index_of] for split in chosen]
        # Graphs are compiled in the order of forward, so a later one is earlier in backward. A
        # shared parameter is ready at its last use in backward.
        splits = [*new, *self._splits]
        owner = {index: number for number, split in enumerate(splits) for index in split}
        own = [
            [index for index in dict.fromkeys(split) if owner[index] == number]
            for number, split in enumerate(splits)
        ]
        self._splits = [split for split in own if split]
        if self._stay and self.stage is not Stage.TAKEN_UP:  # laid out without these splits
            self._anew = True

    def agree(self) -> None:
        """Makes sure that all ranks go on from the same state, if this rank does from any."""
        if self._saved is not None:
            self._saved.agree()

    def rebuild(self) -> list[list[int]] | None:
        """New buckets, if it is time; all ranks come here in the same forward pass.

        They take rank 0's, for the ranks may have seen gradients arrive differently.
        """
        by_arrival = not self._stay and bool(self.arrival)
        if not (self._anew or self._saved or by_arrival):
            return None
        saved = None if self._anew else self._saved
        self._anew, self._saved = False, None
        taken_up = saved is not None and saved.limits == self.caps.limits and self._holds(saved)
        if saved is not None and (taken_up or (not by_arrival and self._begins_with(saved))):
            buckets = self._with_sparse(saved)
        else:
            buckets = self._arranged()
        final = self.rebuilt or by_arrival or taken_up
        agreed, final = agree_on(buckets, final, self._group, self._device)
        if final:
            self.stage = Stage.TAKEN_UP if taken_up else Stage.FINAL
        return agreed

    def _begins_with(self, saved: SavedBuckets) -> bool:
        """Whether its buckets are right until the order of gradients is known."""
        return self.follows_arrival and saved.stage is Stage.FIRST and self._holds(saved)

    def _holds(self, saved: SavedBuckets) -> bool:
        """Whether its buckets hold this model's parameters, and none of different kinds."""
        dense = [index for index, one in enumerate(self._parameters) if not one.sparse]
        if sorted(index for one in saved.members for index in one) != dense:
            return False
        kinds = kinds_of(self._parameters, self.group_of)
        return all(len({kinds[index] for index in one}) == 1 for one in saved.members)

    def _with_sparse(self, saved: SavedBuckets) -> list[list[int]]:
        sparse = [[index] for index, one in enumerate(self._parameters) if one.sparse]
        return [*map(list, saved.members), *sparse]

    def _arranged(self) -> list[list[int]]:
        order = self.arrival or None
        limits = self.caps.limits
        if order is None:
            limits = self.caps.initial(rebuilds=self.follows_arrival)
        splits = [] if self.group_of is not None else self._splits
        return arrange(self._parameters, limits, order=order, group_of=self.group_of, splits=splits)
