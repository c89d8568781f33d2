"""Measures the error of an averaged gradient: in all, per tensor, and as Adam sees it.

The relative squared error of a whole gradient is that of its two or three largest tensors. Adam
divides every entry by its usual size and sees all of them. So there are four figures:

- ``error``: ``|e|^2 / |m|^2`` with ``m`` the exact mean over ranks and ``e`` the error of the
  average (vNMSE);
- ``median`` and ``worst``: the same figure of each parameter alone;
- ``adam``: ``sum e^2 / d^2`` over ``sum m^2 / d^2`` with ``d = sqrt(v) + 1e-8``, the denominator
  of Adam's step; ``v`` is the second moment of the exact means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.core._layout import Layout

__all__ = ["ErrorFigures", "SecondMoment", "error_figures"]

EPS = 1e-8  # Adam's
# Of the gradient's root mean square. Smaller values are float32's rounding where the gradient is
# zero, as of attention's key biases, which softmax cancels: in MiniLM 2e-7, and 0.3 the next one.
ROUNDING = 2.0**-20


class ErrorFigures(NamedTuple):
    """Holds the errors of one averaged gradient, all relative and squared.

    Attributes:
        error: of the whole gradient.
        median: of the tensor in the middle.
        worst: of the tensor with the largest.
        adam: of the gradient, each entry divided by Adam's denominator.
        noise: number of tensors whose exact mean is zero, or nothing but rounding, and whose
            error is larger than it. Tensors of such a mean have no relative error, and are in
            neither ``median`` nor ``worst``.
    """

    error: float
    median: float
    worst: float
    adam: float
    noise: int


class SecondMoment:
    """Keeps Adam's second moment of the exact means of successive steps.

    Args:
        beta: decay per step, Adam's second ``beta``.

    Example:
        >>> moment = SecondMoment()
        >>> moment.updated(torch.tensor([3.0, 0.0])).sqrt()
        tensor([3., 0.], dtype=torch.float64)
    """

    def __init__(self, beta: float = 0.999) -> None:
        self._beta, self._steps = beta, 0
        self._sum: Tensor | None = None

    def updated(self, mean: Tensor) -> Tensor:
        """Adds the exact mean of the next step; returns the bias-corrected moment, in float64."""
        squares = (1 - self._beta) * mean.double().square()
        self._sum = squares if self._sum is None else self._sum.mul_(self._beta).add_(squares)
        self._steps += 1
        return self._sum / (1 - self._beta**self._steps)


def error_figures(mean: Tensor, exact: Tensor, layout: Layout, moment: Tensor) -> ErrorFigures:
    """Returns the errors of an averaged gradient.

    A step of zeros, as of a skipped batch, has no relative error: ``error`` and ``adam`` are
    absolute there. Where ``moment`` is zero, the gradient has been exactly zero in all steps so
    far, as in the rows of an embedding that no batch has used; what is left of the denominator
    is 1e-8. Any error there counts 1e16 fold, so ``adam`` is far above 1, and says which schemes
    do not keep zeros rather than by how much.

    Args:
        mean: flat average that a scheme gave.
        exact: flat mean over ranks.
        layout: of both.
        moment: of the exact means up to this step, see :class:`SecondMoment`.

    Raises:
        ValueError: the tensors have other numbers of entries than the layout.

    Example:
        >>> exact, layout = torch.tensor([4.0, 2.0]), Layout(["a", "b"], [(1,), (1,)])
        >>> error_figures(torch.tensor([4.0, 1.0]), exact, layout, exact.square()).worst
        0.25
    """
    if not mean.numel() == exact.numel() == moment.numel() == layout.numel:
        raise ValueError(
            f"error_figures(mean, exact, layout, moment): {layout.numel} entries each, got "
            f"{mean.numel()}, {exact.numel()} and {moment.numel()}"
        )
    exact = exact.double()
    errors, squares = (mean.double() - exact).square_(), exact.square()
    lost, size = _per_tensor(errors, layout), _per_tensor(squares, layout)
    weight = moment.double().sqrt().add_(EPS).square_().reciprocal_()
    numel = size.new_tensor(layout.sizes)
    empty = size <= numel * (ROUNDING**2 * float(size.sum()) / max(layout.numel, 1))
    relative = (lost / size)[~empty].sort().values  # NaN comes last
    return ErrorFigures(
        error=float(lost.sum()) / (float(size.sum()) or 1.0),
        median=_middle(relative),
        worst=float(relative[-1]) if len(relative) else 0.0,
        adam=float(errors @ weight) / (float(squares @ weight) or 1.0),
        noise=int((empty & (lost > size)).sum()),
    )


def _per_tensor(flat: Tensor, layout: Layout) -> Tensor:
    sums = [part.sum() for part in flat.split(layout.sizes)]
    return torch.stack(sums) if sums else flat.new_zeros(0)


def _middle(ascending: Tensor) -> float:
    """Returns the median; NaN if any value is, since a lost tensor has no error."""
    if not len(ascending):
        return 0.0
    low, high = float(ascending[(len(ascending) - 1) // 2]), float(ascending[len(ascending) // 2])
    return float(ascending[-1]) if ascending[-1].isnan() else low / 2 + high / 2
