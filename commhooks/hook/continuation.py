"""Defines ``Continuation``, which holds a loaded state's buckets until the model has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commhooks.checkpoint.form import SavedBuckets
from commhooks.hook.binding import Binding
from commhooks.hook.runner import Runner
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = ["Continuation"]


class Continuation:
    """Saves which buckets a run has, and restores them in another run.

    Attributes:
        loaded: the buckets of the state that was loaded last.
        handed_over: whether the model has taken these buckets, or cannot take any.
    """

    def __init__(self, binding: Binding, runner: Runner) -> None:
        self._binding, self._runner = binding, runner
        self.loaded = SavedBuckets()
        self.handed_over = True

    def to_come(self, agreed: bool) -> SavedBuckets:
        """Returns the loaded buckets until the ranks have compared them and a step was taken."""
        return self.loaded if self._runner.regrouping.wanted or not agreed else SavedBuckets()

    def saved(self, core: CoreDDP | None) -> SavedBuckets:
        """Returns what another run needs to have the same buckets.

        Args:
            core: the model, if it is ``ddp_core``'s.
        """
        # Before the model has the loaded buckets, its own are not those of the run that goes on.
        if self._runner.regrouping.wanted or not self.handed_over:
            return self.loaded
        if core is None:
            return SavedBuckets(self._runner.regrouping.layout)
        buckets, limits, arrival = core.saved_layout()
        names = self._binding.names
        return SavedBuckets([names(members) for members in buckets], limits, names(arrival))

    def hold(self, buckets: SavedBuckets) -> None:
        """Holds the buckets of an unpickled state until there is a model."""
        self.loaded, self.handed_over = buckets, False
        self._runner.regrouping.restore(buckets.layout, regroups=True)

    def take_up(
        self, buckets: SavedBuckets, core: CoreDDP | None, agree: Callable[[], None]
    ) -> None:
        """Continues with the buckets of a saved state.

        Args:
            core: the model, if it is ``ddp_core``'s.
            agree: compares what the ranks have loaded; called before the next step.
        """
        # torch's class takes no buckets: the runner exchanges in the saved ones until torch has
        # rebuilt its own. ``ddp_core`` lays out the saved buckets at once.
        self._runner.regrouping.restore(buckets.layout, regroups=core is None)
        self.loaded, self.handed_over = buckets, core is not None
        if core is None:
            return
        find = self._binding.parameters.name
        by_name: dict[Any, Any] = {find(value): value for value in core.module.parameters()}
        layout, arrival = buckets.layout, buckets.arrival or ()
        if not all(name in by_name for names in [*layout, arrival] for name in names):
            layout = arrival = ()  # the saved model had other parameters: lay out as usual
        members = [[by_name[name] for name in names] for names in layout]
        order = [by_name[name] for name in arrival]
        # Laying out buckets is a collective of the ranks that have loaded, so the model calls
        # ``agree`` before it: ranks that have loaded different states would hang.
        core.restore_layout(members, buckets.bucket_bytes, order, agree)
