"""Parameters that no rank uses in a step, and whose gradients nobody writes to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ddp_core.reducer.held import HeldBucket
from ddp_core.reducer.launch import Launcher
from ddp_core.reducer.unused import Usage

__all__ = ["LeftAlone"]


class LeftAlone:
    """Finds them for the hook's state, which keeps what it has sent for them.

    A gradient that is its bucket's view has the result, used or not, and is not left alone.

    Args:
        buckets: of the model, as they are now.
        as_view: gradients are views of the buckets.
        launcher: has the hook, whose state may not ask.
    """

    def __init__(
        self, buckets: Sequence[HeldBucket], usage: Usage, launcher: Launcher, *, as_view: bool
    ) -> None:
        self._buckets, self._as_view = buckets, as_view
        self._usage, self._launcher = usage, launcher

    def in_views(self) -> list[int]:
        """Returns unused parameters whose gradient gets the bucket's result all the same.

        The ranks tell each other, for one without inputs (join) cannot see it.
        """
        if not (self._as_view and self._launcher.events.wants_left_alone):
            return []
        used = self._usage.used
        return [
            index
            for bucket in self._buckets
            for slot, index in enumerate(bucket.members)
            if not used.is_used(index) and bucket.is_in_view(slot)
        ]

    def within(self, bucket: HeldBucket, unused: Sequence[bool] | None) -> list[nn.Parameter]:
        """Returns those of one bucket.

        Args:
            unused: by slot, whether no rank uses the parameter; None: all are in use.
        """
        if unused is None or not self._launcher.events.wants_left_alone:
            return []
        finds, used = self._usage.finds, self._usage.used
        return [
            bucket.parameters[slot]
            for slot, index in enumerate(bucket.members)
            if unused[slot] and not (used.in_views(index) if finds else bucket.is_in_view(slot))
        ]
