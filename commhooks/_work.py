"""A bucket as kernels take it, and the way back: dtypes, residual, what is left."""

from __future__ import annotations

import torch
from torch import Tensor

from commhooks._scheme import Context, Exchanged

__all__ = ["Work", "poison"]


class Work:
    """One bucket on its way through a scheme that ``adds_residual``.

    Kernels know no float64: such a gradient is rounded, and feedback gets the difference.

    Attributes:
        x: the gradient, float32, float16 or bfloat16.
        residual: float32, to be added to ``x`` by the kernel that encodes; or None.
        left: float32, where that kernel puts what is not sent; None if nobody asks for it.
    """

    def __init__(self, grad: Tensor, ctx: Context) -> None:
        self._ctx = ctx
        self._exact = ctx.corrected(grad) if grad.dtype == torch.float64 else None
        if self._exact is None:
            self.x, self.residual, self.left = grad, ctx.residual, ctx.unsent
        else:
            self.x, self.residual, self.left = self._exact.to(torch.float32), None, None
        if ctx.keep_unsent and self.left is None:
            self.left = torch.empty_like(self.x, dtype=torch.float32)

    def output(self, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor for the mean, of a dtype if one is asked for, else of one that kernels take."""
        output = self._ctx.output
        if dtype is None:
            dtype = torch.float32 if output.dtype == torch.float64 else output.dtype
        return output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)

    def exchanged(self, mean: Tensor, finite: Tensor | None = None) -> Exchanged:
        """The result, in the gradient's dtype."""
        output, left = self._ctx.output, self.left
        if mean.dtype != output.dtype:
            mean = output.copy_(mean)
        if left is not None and self._exact is not None:
            left = torch.sub(self._exact, self.x, out=self._ctx.unsent).add_(left)
        return Exchanged(mean, unsent=left, finite=finite)


def poison(finite: Tensor) -> Tensor:
    """0 if finite, else NaN: added to a factor, it makes every entry of the product NaN."""
    return torch.where(finite, 0.0, float("nan"))
