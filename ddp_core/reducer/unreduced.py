"""Gradients that come and are not averaged: refused, or not to be stepped by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddp_core.reducer.accumulators import NO_BACKWARD, backward_number
from ddp_core.reducer.graph_errors import GraphErrors, late_error, local_error, twice_error
from ddp_core.reducer.optimizer import before_every_step
from ddp_core.reducer.parameters import Trained
from ddp_core.reducer.step import Step
from ddp_core.reducer.unused import Usage

__all__ = ["Unreduced"]

_HELD = "came within hold(): call reduce() after the last backward pass and before the step"
_MIXED = (
    "came in a backward pass outside of no_sync() whose forward pass was inside: the forward pass "
    "decides, so it was not averaged. Put both inside, or both outside"
)


class Unreduced:
    """Takes note of gradients that stay this rank's own, and raises where ranks would drift apart.

    Within ``no_sync`` and ``hold`` gradients are this rank's own until they are averaged, and no
    optimizer may step by what is held. Elsewhere each belongs to a step, which a forward pass of
    the wrapper begins: one that comes in no step raises.

    Args:
        parameters: of the model.
        errors: raises where passes contradict each other.

    Attributes:
        holding: whether passes are within ``hold``.
        came: whether a gradient has come since gradients were averaged.
        synchronises: says whether the module is outside of ``no_sync`` and ``hold`` now.
        is_shared: says whether another wrapper has a parameter, too, and may average it.
        forward_synchronised: whether the latest forward pass that recorded a graph was.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        usage: Usage,
        errors: GraphErrors,
    ) -> None:
        self._parameters, self._usage, self._errors = parameters, usage, errors
        self.holding = self.came = False
        self.synchronises: Callable[[], bool] = _always
        self.is_shared: Callable[[Tensor], bool] = _never
        self._landed: Step | None = None  # the last step, until the next forward
        self._landed_before: Step | None = None  # the last one at that forward
        self.forward_synchronised = True
        self._order: dict[int, None] = {}
        self._why = ""  # no optimizer may step by gradients of now
        # Of all optimizers, as nobody tells which ones have these parameters.
        before_every_step(self._optimizer_steps)

    @property
    def order(self) -> list[int]:
        """Returns parameters in the order of their last gradients within ``hold``."""
        return list(self._order)

    def gradient_came(self, index: int, step: Step) -> None:
        """Takes note of a gradient that is not averaged now.

        Raises:
            RuntimeError: it would stay this rank's own, and nobody has asked for that.
        """
        self.came = True
        if self.holding:
            self._order.pop(index, None)
            self._order[index] = None
            self._why = self._why or _HELD
        self._refuse_late(index)
        # After an error of the same pass (in another thread of autograd) that one counts.
        if self.holding or step.marked or not self.synchronises():
            return
        if not self.forward_synchronised:
            self._why = self._why or _MIXED
        elif not self.is_shared(self._parameters[index].parameter):
            raise RuntimeError(local_error(self._parameters[index].name, self._landed is not None))

    def _refuse_late(self, index: int) -> None:
        """Raises if a gradient contradicts what the ranks have agreed on in the last step."""
        landed, name = self._landed, self._parameters[index].name
        if landed is None:
            return
        if landed.was_nested or backward_number() == landed.recomputed_in != NO_BACKWARD:
            raise RuntimeError(twice_error(name, index))
        if index in landed.unused and self._usage.is_static:
            self._errors.changed([index], came=True)
        if self._usage.finds and not landed.used[index]:
            raise RuntimeError(late_error(name))

    def forward_begins(self) -> None:
        """Counts a gradient that comes from now on as the next step's."""
        self._landed_before, self._landed = self._landed, None

    def forward_was_recomputed(self) -> None:
        """Takes back what was noted of a forward pass: it was one within ``no_sync``, again."""
        self._landed = self._landed_before
        self.forward_synchronised = False

    def pass_averages(self) -> None:
        """Takes note of a backward pass that averages, with its first gradient."""
        if self.forward_synchronised and not self.synchronises():
            self._errors.only_backward()
        self.averaging_begins()

    def averaging_begins(self) -> None:
        """Lets optimizers step again, those in backward first."""
        self._why = ""

    def step_landed(self, step: Step) -> None:
        """Forgets what came before: it was averaged; what comes from now on is too late for it."""
        self.came, self._landed = False, step
        self._order.clear()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises before a step that would use gradients of this rank only."""
        name = self._first_with_gradient(optimizer) if self._why else None
        if name is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step would use this rank's own gradient of {name}, "
                f"and ranks would drift apart: it {self._why}. To drop such gradients call "
                f"zero_grad(set_to_none=True)"
            )

    def _first_with_gradient(self, optimizer: torch.optim.Optimizer) -> str | None:
        name_of = {id(one.parameter): one.name for one in self._parameters}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in name_of and parameter.grad is not None:
                    return name_of[id(parameter)]
        return None


def _always() -> bool:
    return True


def _never(_: Tensor) -> bool:
    return False
