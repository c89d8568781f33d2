"""Measures one bucket of a verified step where each rank gets its shard of the mean alone.

The dense mean of the shard comes by one more reduce-scatter in the bucket's own exchange, so that
no copy of a gradient is kept until the step is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.core.scheme import Scheme
from commhooks.core.shards import Span, to_rows
from commhooks.hook.measurement import Comparison, Measurement, norms_of, sketches_of
from ddp_core import ReduceScatter

__all__ = ["ShardMeasurement"]

# What a rank tells the others of each piece of a parameter: norms of its gradient and residual; and
# of the part in its shard the norms of the averaged gradient, of its error and of the dense mean,
# and the product of the two means.
_ROWS = ("gradient", "residual", "mean", "error", "dense", "dot")


class ShardMeasurement(Measurement):
    """Compares this rank's shard of the averaged gradient with the dense mean of that shard.

    Args:
        bucket, layout, gradient, scheme, step: see :class:`Measurement`.
        shards: begin and end of the shard of each rank.
        rank: this one.
    """

    def __init__(
        self,
        bucket: int,
        layout: Layout,
        gradient: Tensor,
        scheme: Scheme,
        step: int,
        shards: Sequence[Span],
        rank: int,
    ) -> None:
        super().__init__(bucket, layout, gradient, scheme, step)
        self.shards, self._rank = shards, rank

    def finish(self, mean: Tensor, memory: Memory) -> None:
        flat, self._residual = mean.detach().view(-1), torch.zeros_like(self._own)
        self._mean = flat
        if self._keeps_residual:
            sent = self.difference.clone()
            self._residual = self._add_residual(sent, memory)
            # Of the mean over ranks, one rank subtracts all.
            begin, end = self.shards[self._rank]
            sent[begin:end].sub_(flat, alpha=len(self.shards))
            self.balance = sketches_of(self._views(sent), self._step)
        else:
            self._residual = self._add_residual(self.difference, memory)

    def compare(self) -> Comparison:
        request = ReduceScatter(to_rows(self.difference, self.shards), "mean")
        arrived = yield request
        begin, end = self.shards[self._rank]
        dense = arrived.view(-1)[: end - begin]
        mean = self._mean.to(dense.dtype)
        self.rows = self._own.new_zeros(len(_ROWS), len(self.layout))
        self.rows[0], self.rows[1] = self._own, self._residual
        here = _parts_in(self.layout, begin, end)
        if here:
            columns = torch.tensor([column for column, _ in here], device=self.rows.device)
            cuts = [slice(first - begin, last - begin) for _, (first, last) in here]
            sizes = [last - first for _, (first, last) in here]  # one after the other
            for row, flat in enumerate((mean, dense - mean, dense), 2):
                self.rows[row, columns] = norms_of(flat, sizes)
            dots = [torch.dot(mean[cut], dense[cut]) for cut in cuts]
            self.rows[5, columns] = torch.stack(dots).double()
        del self.difference, self._mean  # as large as the gradient of all ranks

    def operands(self) -> list[Tensor]:
        return [] if self.balance is None else [self.balance]

    def balances(self) -> Tensor | None:
        """Returns the norms of ``balance`` per piece, on the CPU."""
        return None if self.balance is None else self.balance.norm(dim=1).cpu()


def _parts_in(layout: Layout, begin: int, end: int) -> list[tuple[int, Span]]:
    """Returns the pieces of a layout that are in a range, with begin and end of what is in it."""
    found = []
    for column, (first, size) in enumerate(zip(layout.offsets, layout.sizes, strict=False)):
        part = max(first, begin), min(first + size, end)
        if part[0] < part[1]:
            found.append((column, part))
    return found
