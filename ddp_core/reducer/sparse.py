"""A bucket of one parameter whose gradients are sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_core.reducer.held import HeldBucket
from ddp_core.reducer.parameters import Trained

__all__ = ["SparseBucket"]


class SparseBucket(HeldBucket):
    """Holds the gradient of an embedding; the buffer becomes the gradient.

    Args:
        members: the index of its parameter.
        parameters: of the whole model.
        number: position in launch order.
    """

    sparse = True

    def __init__(
        self, members: Sequence[int], parameters: Sequence[Trained], *, number: int = 0
    ) -> None:
        super().__init__(members, parameters, number=number)
        (self._parameter,) = self.parameters
        # How many entries there will be is not known before a gradient has come.
        self.buffer = self._parameter.detach().new_empty(0)

    def clear(self) -> None:
        self.buffer = _no_entries(self._parameter)

    @torch.no_grad()
    def fill(self, gradients: Sequence[Tensor | None], divisor: float | None) -> None:
        (grad,) = gradients
        if grad is None:
            grad = self._parameter.grad = _no_entries(self._parameter)
        # A copy: the sum of two embeddings hands both the same tensor of values, and collectives
        # work in place.
        values = grad.detach()
        self.buffer = values.clone() if divisor is None else values / divisor

    @torch.no_grad()
    def scatter(self, result: Tensor, unused: Sequence[bool] | None = None) -> None:
        if unused is not None and unused[0]:
            return
        if result is not self.buffer:
            self.buffer.copy_(result)
        self._parameter.grad = self.buffer


def _no_entries(like: Tensor) -> Tensor:
    """A sparse tensor of zeros."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    values = like.detach().new_empty((0, *like.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)
