"""The bucket plan: which buckets there are now, and when they are laid out anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ddp_core._layout import BucketCaps, BucketGroup, agree_on, arrange, kinds_of
from ddp_core._parameters import Trained

__all__ = ["BucketPlan", "SavedBuckets"]


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


class BucketPlan:
    """Decides on buckets: by registration, then by arrival, by the compiler, or as a scheme asks.

    Args:
        parameters: of the model; the same on all ranks.
        caps: sizes of buckets.
        group, device: for the message by which ranks agree.
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
        self.follows_arrival = True  # rebuild once the order of gradients is known
        self.rebuilt = False  # by arrival, here or in the run that this one goes on from
        self.arrival: list[int] = []  # order of gradients in the last complete step
        self.group_of: BucketGroup | None = None  # the layout that a scheme asked for
        self._splits: list[list[int]] = []  # the buckets that the compiler chose
        self._asked = False
        self._saved: SavedBuckets | None = None  # until the next step begins
        self._goes_on = False  # from another run, which has had its first step
        self._restored = False  # that run's buckets were taken up

    def initial(self) -> list[list[int]]:
        """Buckets of the first step."""
        limits = self.caps.initial(rebuilds=self.follows_arrival)
        return arrange(self._parameters, limits)

    def request(self, group_of: BucketGroup | None, caps: BucketCaps | None = None) -> None:
        """Buckets hold parameters of one group each from the next step on; None: as usual.

        Args:
            caps: other sizes of buckets, if given.
        """
        other_caps = caps is not None and caps != self.caps and not self.follows_arrival
        other_groups = group_of is not None or self.group_of is not None
        to_restore = self.follows_arrival and self._saved is not None and bool(self._saved.limits)
        rebuilt = self.rebuilt or to_restore
        self._asked = self._asked or rebuilt or other_caps or other_groups
        if self._asked and self._saved is not None:  # it was loaded before this was asked for
            limits = self.caps.limits if self._goes_on else ()
            self._saved = replace(self._saved, members=(), limits=limits)
        self.group_of = group_of
        self.caps = caps or self.caps

    def go_on_from(self, saved: SavedBuckets) -> None:
        """Takes up another run's buckets when the next step begins; all ranks call it alike.

        Where those do not suit this model (its parameters, its sizes of buckets, the layout that a
        scheme asks for), buckets are laid out by that run's order of arrival, if it is known.
        """
        self._saved = saved
        self._goes_on = bool(saved.members or saved.limits or saved.arrival)
        self._asked = self._asked or not saved.members
        self.rebuilt = False
        complete = sorted(saved.arrival) == list(range(len(self._parameters)))
        self.arrival = list(saved.arrival) if complete else []

    def to_save(
        self, present: Sequence[Sequence[int]], *, stepped: bool
    ) -> tuple[Sequence[Sequence[int]], tuple[int, ...]]:
        """What another run is to go on from: ``members`` and ``limits`` of :class:`SavedBuckets`.

        Args:
            present: indices of the parameters of each dense bucket that there is now.
            stepped: there was a step in this process.
        """
        if self._saved is not None:
            return self._saved.members, self._saved.limits
        if not stepped:
            return (), ()
        if self._asked:
            return (), self.caps.limits
        final = self.rebuilt or not self.follows_arrival
        return present, self.caps.limits if final else ()

    def _suits(self, saved: SavedBuckets) -> bool:
        return saved.limits == self.caps.limits and self._holds(saved)

    def _holds(self, saved: SavedBuckets) -> bool:
        """Whether its buckets hold this model's parameters, and none of different kinds."""
        dense = [index for index, one in enumerate(self._parameters) if not one.sparse]
        if sorted(index for one in saved.members for index in one) != dense:
            return False
        kinds = kinds_of(self._parameters, self.group_of)
        return all(len({kinds[index] for index in one}) == 1 for one in saved.members)

    def take_arrival(self, order: list[int], *, learned: bool = False) -> None:
        """The order in which gradients came in a step.

        Args:
            learned: it is the ranks' first step of a static graph. PyTorch rebuilds buckets by
                the second one, and so does a run that starts here.
        """
        if len(order) == len(self._parameters) and (self._goes_on or not learned):
            self.arrival = order

    def assume_arrival(self, *, learned: bool = False) -> None:
        """Registration order, on a rank that saw no gradients arrive (it has no input: join)."""
        if not self.arrival and (self._goes_on or not learned):
            self.arrival = list(range(len(self._parameters)))

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
        early = self.rebuilt or not self.follows_arrival  # they were laid out without the splits
        self._asked = self._asked or (early and not self._restored)

    def agree(self) -> None:
        """Makes sure that all ranks go on from the same state, if this rank does from any."""
        if self._saved is not None:
            self._saved.agree()

    def rebuild(self, present: Sequence[Sequence[int]]) -> list[list[int]] | None:
        """New buckets, if it is time; all ranks come here in the same forward pass.

        They take rank 0's, for the ranks may have seen gradients arrive differently.

        Args:
            present: indices of the parameters of each bucket that there is now.
        """
        saved, self._saved = self._saved, None
        by_arrival = self.follows_arrival and not self.rebuilt and bool(self.arrival)
        first = saved is not None and self.follows_arrival and not saved.limits  # steps of that run
        if saved is not None and self._suits(saved):
            buckets = self._with_sparse(saved)
            by_arrival, self._restored = self.follows_arrival, True
        elif by_arrival or self._asked:
            buckets = self._arranged()
        elif saved is not None and first and self._holds(saved):
            buckets = self._with_sparse(saved)
        elif saved is not None:  # another rank may have reason to
            buckets = [list(one) for one in present]
        else:
            return None
        final = self.rebuilt or by_arrival
        agreed, self.rebuilt = agree_on(buckets, final, self._group, self._device)
        self._asked = False
        return agreed

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
