"""``Regrouping``: which buckets a run has, and which those of a loaded state were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commhooks.hook.coalesce import Names
from commhooks.hook.step import Step

__all__ = ["Regrouping"]

# From which step of a process on torch's DistributedDataParallel has rebuilt its buckets.
REBUILT_IN, STATIC_REBUILT_IN = 2, 3


class Regrouping:
    """Exchanges in a loaded state's buckets until DistributedDataParallel has rebuilt its own.

    Attributes:
        layout: parameters of each bucket of the last step.
        wanted: the layout that a loaded state asks for, while it does.
    """

    def __init__(self) -> None:
        self.layout: list[Names] = []
        self.wanted: list[Names] = []
        self._layout_of: list[Any] = []  # the buckets that had it
        self._age = 0  # steps since this began, or has loaded a state

    def restore(self, layout: Sequence[Sequence[str]], *, regroups: bool) -> None:
        """Takes the layout with which a state was saved.

        Args:
            regroups: False where the model lays out the saved buckets itself.
        """
        self.layout = [tuple(names) for names in layout]
        self.wanted = self.layout if regroups else []
        self._age = 0

    def step_ended(self, step: Step, *, static_graph: bool) -> None:
        """Takes down how a step was laid out."""
        self._age += 1
        # torch rebuilds the buckets of a static graph a step later.
        rebuilt = self._age >= (STATIC_REBUILT_IN if static_graph else REBUILT_IN)
        regrouped = None if rebuilt else step.regrouped  # in the next step, too
        if step.holds or self._age <= REBUILT_IN or step.buckets != self._layout_of:
            own = [find_layout().names for find_layout in step.layouts]
            self.layout = own if regrouped is None else regrouped
            self._layout_of = step.buckets if regrouped is None else []
        if rebuilt:
            self.wanted = []
