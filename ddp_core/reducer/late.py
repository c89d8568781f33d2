"""Gradients that come after the step's were averaged."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ddp_core.reducer.accumulators import NO_BACKWARD, backward_number
from ddp_core.reducer.graph_errors import GraphErrors, late_error, twice_error
from ddp_core.reducer.parameters import Trained
from ddp_core.reducer.step import Step
from ddp_core.reducer.unused import Usage

__all__ = ["LateGradients"]

logger = logging.getLogger("ddp_core")


class LateGradients:
    """Leaves late gradients this rank's own, as in torch, or raises where ranks would drift apart.

    Args:
        parameters: of the model.
        errors: raises where a static graph turns out not to be one.
    """

    def __init__(self, parameters: Sequence[Trained], usage: Usage, errors: GraphErrors) -> None:
        self._parameters, self._usage, self._errors = parameters, usage, errors
        self._landed: Step | None = None  # the last step, until the next forward
        self._landed_before: Step | None = None  # the last one at that forward
        self._warned = False

    def step_landed(self, step: Step) -> None:
        """Counts a gradient that comes from now on as late for this step."""
        self._landed = step

    def forward_begins(self) -> None:
        """Counts a gradient that comes from now on as the next step's."""
        self._landed_before, self._landed = self._landed, None

    def forward_was_recomputed(self) -> None:
        """Takes back ``forward_begins``: that pass was the last step's, once more."""
        self._landed = self._landed_before

    def came(self, index: int) -> None:
        """Takes note of a gradient that came while no step expects any.

        Raises:
            RuntimeError: it would stay this rank's own against what the ranks have agreed on.
        """
        landed = self._landed
        if landed is None:  # no_sync
            return
        name = self._parameters[index].name
        if backward_number() == landed.recomputed_in != NO_BACKWARD:
            raise RuntimeError(twice_error(name, index))
        if index in landed.unused and self._usage.is_static:
            self._errors.changed([index], came=True)
        if self._usage.finds and not landed.used[index]:
            raise RuntimeError(late_error(name))
        if not self._warned:
            self._warned = True
            logger.warning(
                "the gradient of %s came after this step's gradients were averaged, in a backward "
                "pass that has no forward pass of its own: it stays this rank's own until the "
                "next step. To average it, add the losses and call backward once",
                name,
            )
