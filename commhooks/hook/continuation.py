"""``Continuation``: the buckets of a loaded state, until the model has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commhooks.checkpoint.form import SavedBuckets
from commhooks.hook.binding import Binding
from commhooks.hook.runner import Runner
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = ["Continuation"]


class Continuation:
    """Saves which buckets a run has, and gives another run the same.

    Attributes:
        loaded: the buckets of the state that was loaded last.
        handed_over: the model has them, or is not one that takes any.
    """

    def __init__(self, binding: Binding, runner: Runner) -> None:
        self._binding, self._runner = binding, runner
        self.loaded = SavedBuckets()
        self.handed_over = True

    def to_come(self, agreed: bool) -> SavedBuckets:
        """The loaded buckets, while no step has been taken with them."""
        return self.loaded if self._runner.regrouping.wanted or not agreed else SavedBuckets()

    def saved(self, core: CoreDDP | None) -> SavedBuckets:
        """What another run needs to have the same buckets.

        Args:
            core: the model, if it is ``ddp_core``'s.
        """
        if self._runner.regrouping.wanted or not self.handed_over:
            return self.loaded
        if core is None:
            return SavedBuckets(self._runner.regrouping.layout)
        buckets, limits, arrival = core.saved_layout()
        names = self._binding.names
        return SavedBuckets([names(one) for one in buckets], limits, names(arrival))

    def hold(self, buckets: SavedBuckets) -> None:
        """Keeps the buckets of an unpickled state until there is a model."""
        self.loaded, self.handed_over = buckets, False
        self._runner.regrouping.restore(buckets.layout, regroups=True)

    def take_up(
        self, buckets: SavedBuckets, core: CoreDDP | None, agree: Callable[[], None]
    ) -> None:
        """Goes on with the buckets of a saved state, where the model can.

        Args:
            core: the model, if it is ``ddp_core``'s.
            agree: compares with the other ranks what each has loaded; called before the next step.
        """
        self._runner.regrouping.restore(buckets.layout, regroups=core is None)
        self.loaded, self.handed_over = buckets, core is not None
        if core is None:
            return
        find = self._binding.parameters.name
        by_name: dict[Any, Any] = {find(one): one for one in core.module.parameters()}
        layout, arrival = buckets.layout, buckets.arrival or ()
        if not all(name in by_name for names in [*layout, arrival] for name in names):
            layout = arrival = ()  # of a model with other parameters
        members = [[by_name[name] for name in names] for names in layout]
        order = [by_name[name] for name in arrival]
        core.restore_layout(members, buckets.bucket_bytes, order, agree)
