"""The bucket plan: which buckets there are now, and when they are laid out anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist

from ddp_core._layout import BucketCaps, BucketGroup, agree_on, arrange
from ddp_core._parameters import Trained

__all__ = ["BucketPlan"]


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
        self.rebuilt = False
        self.arrival: list[int] = []  # order of gradients in the last complete step
        self.group_of: BucketGroup | None = None  # the layout that a scheme asked for
        self._splits: list[list[int]] = []  # the buckets that the compiler chose
        self._asked = False
        self._started = False  # from another run's buckets
        self._saved: list[list[int]] = []  # those buckets, until they are laid out

    def initial(self) -> list[list[int]]:
        """Buckets of the first step."""
        limits = self.caps.initial(rebuilds=self.follows_arrival)
        return arrange(self._parameters, limits)

    def request(self, group_of: BucketGroup | None, caps: BucketCaps | None = None) -> None:
        """Buckets hold parameters of one group each from the next step on; None: as usual.

        Args:
            caps: other sizes of buckets, if given.
        """
        self._asked = self._asked or self.rebuilt or group_of is not None or bool(self.group_of)
        self.group_of = group_of
        self.caps = caps or self.caps

    def start_from(self, buckets: Sequence[Sequence[int]]) -> None:
        """Lays out buckets in the order of another run's, from the next step on; for good.

        Args:
            buckets: indices of parameters; those that are in none come last.
        """
        saved = [list(bucket) for bucket in buckets]
        every = range(len(self._parameters))
        order = list(dict.fromkeys([*chain.from_iterable(saved), *every]))
        if sorted(order) == list(every):
            self.arrival, self._asked, self._started, self._saved = order, True, True, saved

    def take_arrival(self, order: list[int]) -> None:
        """The order in which gradients came in a step."""
        if len(order) == len(self._parameters):
            self.arrival = order

    def assume_arrival(self) -> None:
        """Registration order, on a rank that saw no gradients arrive (it has no input: join)."""
        if not self.arrival:
            self.arrival = list(range(len(self._parameters)))

    def take_splits(self, chosen: Sequence[Sequence[int]], *, first_step: bool) -> None:
        """The compiler split a graph: its splits are the buckets when they are rebuilt.

        Args:
            chosen: ids of the parameters of each split, in the order of backward.
            first_step: one rank's later recompilation must not move buckets.
        """
        if (self.rebuilt and not self._started) or not first_step:
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
        self._asked = self._asked or self._started or not self.follows_arrival
        self._started = False

    def rebuild(self) -> list[list[int]] | None:
        """New buckets, if it is time; all ranks come here in the same forward pass.

        They take rank 0's, for the ranks may have seen gradients arrive differently.
        """
        by_arrival = self.follows_arrival and not self.rebuilt and bool(self.arrival)
        if not by_arrival and not self._asked:
            return None
        buckets = self._arranged(self.arrival or None)
        if self._saved and not self.follows_arrival:
            registered = self._arranged(None)
            if all(one in registered for one in self._saved):  # that run never had others
                buckets = registered
        agreed = agree_on(buckets, len(self._parameters), self._group, self._device)
        self._asked, self._saved = False, []
        self.rebuilt = self.rebuilt or by_arrival
        return agreed

    def _arranged(self, order: Sequence[int] | None) -> list[list[int]]:
        """Buckets by the order in which gradients arrived; None: by registration."""
        limits = self.caps.limits
        if order is None:
            limits = self.caps.initial(rebuilds=self.follows_arrival)
        splits = [] if self.group_of is not None else self._splits
        return arrange(self._parameters, limits, order=order, group_of=self.group_of, splits=splits)
