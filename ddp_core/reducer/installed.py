"""The buckets that a reducer has now, and where each parameter's gradient goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_core.reducer.flat import FlatBucket
from ddp_core.reducer.held import HeldBucket
from ddp_core.reducer.parameters import Trained
from ddp_core.reducer.sparse import SparseBucket

__all__ = ["InstalledBuckets"]


class InstalledBuckets:
    """Holds a model's buckets, which are exchanged for others as the plan says.

    Args:
        parameters: of the model.
        dtype: of the buckets; the parameters' own by default.
        as_view: gradients become views of the buckets.
        copies_at_once: whether large gradients are copied as they come.

    Attributes:
        list: in the order in which they are launched; the same object for good.
        place: by parameter, its bucket, and that again if its gradient is copied at once; the same
            object for good.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        *,
        dtype: torch.dtype | None,
        as_view: bool,
        copies_at_once: bool,
    ) -> None:
        self._parameters, self._dtype, self._as_view = parameters, dtype, as_view
        self._copies_at_once = copies_at_once
        self.list: list[HeldBucket] = []
        self.place: dict[int, tuple[HeldBucket, FlatBucket | None]] = {}

    @property
    def members(self) -> list[list[int]]:
        """Returns the indices of the parameters of each bucket."""
        return [bucket.members for bucket in self.list]

    def install(self, members: Sequence[Sequence[int]]) -> None:
        """Takes other buckets, with the gradients that there are now."""
        self.list.clear()  # the old ones go first: not both at a time
        self.place.clear()
        for number, one in enumerate(members):
            bucket = self._bucket(number, one)
            bucket.adopt_gradients()
            self.list.append(bucket)
            for index in one:
                self.place[index] = bucket, self._at_once(bucket, index)

    def _bucket(self, number: int, members: Sequence[int]) -> HeldBucket:
        if self._parameters[members[0]].sparse:
            return SparseBucket(members, self._parameters, number=number)
        return FlatBucket(
            members, self._parameters, number=number, dtype=self._dtype, as_view=self._as_view
        )

    def _at_once(self, bucket: HeldBucket, index: int) -> FlatBucket | None:
        if self._copies_at_once and isinstance(bucket, FlatBucket) and bucket.is_large(index):
            return bucket
        return None
