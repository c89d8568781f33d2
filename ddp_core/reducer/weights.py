"""What each rank's gradient counts in the mean, where ranks say so."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core._torch import sparse_values
from ddp_core.reducer.accumulators import NO_BACKWARD, backward_number
from ddp_core.reducer.launch import Launcher
from ddp_core.reducer.parameters import Trained

__all__ = ["Weights", "checked_weight"]

_IDLE, _GIVEN, _MISSING = 0.0, 1.0, 2.0  # what a rank's row says of its weight


def checked_weight(value: Any) -> float:
    """Returns a weight as a number.

    Raises:
        TypeError: it is not one number.
        ValueError: it is NaN, infinite or negative.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(
                f"weight(n) takes one number, got a tensor of shape {tuple(value.shape)} and "
                f"{value.dtype}"
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"weight(n) takes a number or a tensor of one, got {type(value).__name__}")
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"weight(n) needs 0 <= n < infinity, got {number}")
    return number


class Weights:
    """Counts, on one rank, what the gradients of a step are of; all ranks' counts give a factor.

    Args:
        kind: what a loss is of what is counted, "mean" or "sum".
        parameters: whose gradients are weighted.
    """

    def __init__(
        self,
        kind: Literal["mean", "sum"],
        parameters: Sequence[Trained],
        launcher: Launcher,
        device: torch.device,
    ) -> None:
        self._kind, self._parameters = kind, parameters
        self._launcher, self._device = launcher, device
        self._begin()

    def _begin(self) -> None:
        self._given: float | None = None  # the latest weight
        self._counted = True  # it is in the total
        self._total = 0.0  # of the passes that have come
        self._unit = 1.0  # what the accumulated gradient is multiplied by to be a sum
        self._passes = 0
        self._in_pass = NO_BACKWARD  # number of the latest one
        self._lacks_weight = False
        self._table: Tensor | None = None  # a row per rank
        self._work: dist.Work | None = None
        self._factor: float | None = None

    # ---- one rank

    def give(self, value: Any) -> None:
        """Says what the gradients of the passes to come count.

        Raises:
            TypeError, ValueError: see :func:`checked_weight`; or it is 0 and cannot be.
        """
        number = checked_weight(value)
        if self._passes and not self._any_gradient():
            self._begin()  # zero_grad() has dropped what was counted
        if self._kind == "mean":
            self._change_unit(number)
        self._given, self._counted = number, False

    def _change_unit(self, unit: float) -> None:
        """Makes the accumulated gradient a sum of gradients over ``unit``, as the next one is."""
        if self._passes and unit != self._unit:
            if not unit:
                raise ValueError(
                    "weight(0) after other passes of this step: the gradient of a mean of nothing "
                    "is not a number, and would be added to theirs. Leave this pass out, or let "
                    "losses be sums: DistributedDataParallel(..., weighted='sum')"
                )
            self._scale_gradients(self._unit / unit)
        self._unit = unit

    @torch.no_grad()
    def _scale_gradients(self, ratio: float) -> None:
        for one in self._parameters:
            grad = one.parameter.grad
            if grad is None:
                continue
            if ratio:
                grad.mul_(ratio)
            else:  # of no weight, and possibly not a number
                grad.zero_()

    def _any_gradient(self, but: int = -1) -> bool:
        """Whether a gradient is there that is not zero; most often the first one tells."""
        present = (one.parameter.grad for i, one in enumerate(self._parameters) if i != but)
        flags = (_values(grad).any() for grad in present if grad is not None)
        if self._device.type == "cpu":
            return any(map(bool, flags))
        together = list(flags)  # each look would make the host wait for the device
        return bool(together) and bool(torch.stack(together).any())

    def gradient_came(self, index: int = -1) -> None:
        """Takes note of a backward pass, with its first gradient.

        Args:
            index: of the parameter; -1 if the pass has begun and none has come.

        Raises:
            RuntimeError: it was added to gradients of an earlier step.
        """
        number = backward_number()
        if number == self._in_pass:
            return
        self._in_pass = number
        # Not in the forward pass: many a script calls zero_grad() between forward and backward.
        if not self._passes and self._any_gradient(but=index):
            raise RuntimeError(
                "weighted gradients begin at zero in every step, and .grad was not zero when the "
                "first backward pass of this one began: call zero_grad() before it. Otherwise the "
                "gradient of an earlier step is averaged by weight once more"
            )
        self._passes += 1
        if self._given is None:
            self._lacks_weight = True
        self._count()

    def _count(self) -> None:
        if not self._counted:
            assert self._given is not None
            self._total += self._given
            self._counted = True

    # ---- all ranks

    def send(self) -> None:
        """Starts the message of a step; all ranks call it at the same place."""
        if self._kind == "sum" and self._passes and self._given is not None:
            self._lacks_weight = False  # a sum's weight may be told after its passes
            self._count()
        state = _MISSING if self._lacks_weight else _GIVEN if self._passes else _IDLE
        group = self._launcher.group
        # A sum of rows that are zero elsewhere: exact, and one collective of any back end.
        rows = [[0.0, 0.0] for _ in range(group.size())]
        rows[group.rank()] = [state, self._total]
        with self._launcher.beside():
            self._table = torch.tensor(rows, dtype=torch.float64, device=self._device)
            self._work = dist.all_reduce(self._table, group=group, async_op=True)

    def factor(self) -> float:
        """Returns what this rank's gradient is multiplied by before it is averaged.

        Raises:
            RuntimeError: a rank has not said its weight.
            ValueError: the ranks' weights are all 0.
        """
        if self._factor is None:
            rows, ranks = self._received(), self._launcher.group.size()
            silent = [rank for rank, (state, _) in enumerate(rows) if state == _MISSING]
            if silent:
                raise RuntimeError(
                    f"weight(n) was not called before a backward pass of step "
                    f"{self._launcher.step} on rank {', '.join(map(str, silent))}. With "
                    f"weighted={self._kind!r} every rank calls it before each backward pass, with "
                    f"0 where it has nothing"
                )
            everything = math.fsum(total for _, total in rows)
            if not everything:
                raise ValueError(
                    f"the weights of all ranks are 0 in step {self._launcher.step}: there is no "
                    f"mean. Leave the step out on all ranks"
                )
            unit = self._unit if self._kind == "mean" else 1.0
            # For equal weights this is 1 exactly: product and sum are rounded once, and alike.
            self._factor = unit * ranks / everything if self._total else 0.0
        return self._factor

    def _received(self) -> list[list[float]]:
        assert self._table is not None
        assert self._work is not None
        with self._launcher.beside():
            self._launcher.await_message(self._work, self._device, "the sum of weights")
            rows: list[list[float]] = self._table.tolist()
        self._work = None
        return rows

    def step_ended(self) -> None:
        """Starts anew, after a step that has landed or was abandoned."""
        if self._work is not None:
            with contextlib.suppress(Exception), self._launcher.beside():  # the step has raised
                self._launcher.await_work(self._work, self._device)
        self._begin()


def _values(grad: Tensor) -> Tensor:
    return sparse_values(grad) if grad.is_sparse else grad
