"""Gradients that have come and were not averaged, by which no optimizer may step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_core.reducer.graph_errors import GraphErrors
from ddp_core.reducer.late import LateGradients
from ddp_core.reducer.parameters import Trained

__all__ = ["Unreduced"]

_HELD = "came within hold(): call reduce() after the last backward pass and before the step"
_MIXED = (
    "came in a backward pass outside of no_sync() whose forward pass was inside: the forward pass "
    "decides, so it was not averaged. Put both inside, or both outside"
)


class Unreduced:
    """Takes note of gradients that stay this rank's own, and refuses to step by them.

    Args:
        parameters: of the model.
        late: finds out which of them come after their step.
        errors: raises where backward alone is within ``no_sync`` or ``hold``.

    Attributes:
        holding: whether passes are within ``hold``.
        came: whether a gradient has come since gradients were averaged.
        synchronises: says whether the module is outside of ``no_sync`` and ``hold`` now.
        forward_synchronised: whether the latest forward pass that recorded a graph was.
    """

    def __init__(
        self,
        parameters: Sequence[Trained],
        late: LateGradients,
        errors: GraphErrors,
    ) -> None:
        self._parameters, self._late, self._errors = parameters, late, errors
        self.holding = self.came = False
        self.synchronises: Callable[[], bool] = _always
        self.forward_synchronised = True
        self._order: dict[int, None] = {}
        self._disarm: Callable[[], object] | None = None

    @property
    def order(self) -> list[int]:
        """Returns parameters in the order of their last gradients within ``hold``."""
        return list(self._order)

    def gradient_came(self, index: int) -> None:
        """Takes note of a gradient that is not averaged now."""
        self.came = True
        if self.holding:
            self._order.pop(index, None)
            self._order[index] = None
            self._arm(_HELD)
        elif not self.forward_synchronised and self.synchronises():
            self._arm(_MIXED)
        self._late.came(index)

    def forward_was_recomputed(self) -> None:
        """Takes back what was noted of a forward pass: it was one within ``no_sync``, again."""
        self._late.forward_was_recomputed()
        self.forward_synchronised = False

    def pass_averages(self) -> None:
        """Takes note of a backward pass that averages, with its first gradient."""
        if self.forward_synchronised and not self.synchronises():
            self._errors.only_backward()
        self.averaging_begins()

    def averaging_begins(self) -> None:
        """Lets optimizers step again, those in backward first."""
        if self._disarm is not None:
            self._disarm()
            self._disarm = None

    def step_landed(self) -> None:
        """Forgets what came before: it was averaged."""
        self.came = False
        self._order.clear()

    def _arm(self, why: str) -> None:
        if self._disarm is not None:
            return
        # For all optimizers, as nobody tells which ones have these parameters. It is there only
        # while a step would be a mistake, or somebody else's.
        refuse = partial(_refuse, weakref.ref(self), why)
        handle = register_optimizer_step_pre_hook(refuse)
        self._disarm = weakref.finalize(self, handle.remove)

    def _first_with_gradient(self, optimizer: torch.optim.Optimizer) -> str | None:
        name_of = {id(one.parameter): one.name for one in self._parameters}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in name_of and parameter.grad is not None:
                    return name_of[id(parameter)]
        return None


def _always() -> bool:
    return True


def _refuse(
    me: weakref.ref[Unreduced], why: str, optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    unreduced = me()
    name = None if unreduced is None else unreduced._first_with_gradient(optimizer)
    if name is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step would use this rank's own gradient of {name}, and "
            f"ranks would drift apart: it {why}. To drop such gradients call "
            f"zero_grad(set_to_none=True)"
        )
