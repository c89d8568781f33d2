"""Defines ``Regrouping``, which knows this run's buckets and those of a loaded state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commhooks.hook.coalesce import Names
from commhooks.hook.step import Step

__all__ = ["Regrouping"]

# The step of a process from which on torch's DistributedDataParallel has rebuilt its buckets.
REBUILT_IN, STATIC_REBUILT_IN = 2, 3


class Regrouping:
    """Decides in which buckets to exchange until DistributedDataParallel has rebuilt its own.

    Attributes:
        layout: names of the parameters of each bucket; what a state saves.
        wanted: the layout of a loaded state while the run exchanges in it, else empty.
    """

    def __init__(self) -> None:
        self.layout: list[Names] = []
        self.wanted: list[Names] = []
        self._layout_of: list[Any] = []  # keys of the buckets that ``layout`` describes
        self._age = 0  # steps since the start, or since a state was loaded

    def restore(self, layout: Sequence[Sequence[str]], *, regroups: bool) -> None:
        """Takes the layout of a loaded state.

        Args:
            regroups: False if the model lays out the saved buckets itself.
        """
        self.layout = [tuple(names) for names in layout]
        self.wanted = self.layout if regroups else []
        self._age = 0

    def step_ended(self, step: Step, *, static_graph: bool) -> None:
        """Notes the layout of a step that has ended."""
        self._age += 1
        # torch rebuilds the buckets of a static graph a step later.
        rebuilt = self._age >= (STATIC_REBUILT_IN if static_graph else REBUILT_IN)
        # A state has the layout of the next step, which is the loaded one while this run regroups.
        regrouped = None if rebuilt else step.regrouped
        # Layouts are looked up only if they may have changed: a look-up is work per parameter.
        if step.holds or self._age <= REBUILT_IN or step.buckets != self._layout_of:
            present = [find_layout().names for find_layout in step.layouts]
            self.layout = present if regrouped is None else regrouped
            self._layout_of = step.buckets if regrouped is None else []
        if rebuilt:
            self.wanted = []
