"""Measures one bucket of a verified step where each rank gets its shard of the mean alone.

No copy of a gradient is kept until the step is over: the ranks average sketches, or the dense mean
of the shard comes by one more reduce-scatter in the bucket's own exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.core.scheme import Scheme
from commhooks.core.shards import Span, to_rows
from commhooks.hook.measurement import Comparison, Measurement, norms_of
from commhooks.hook.sketch import dots_of
from ddp_core import ReduceScatter

__all__ = ["Compared", "ShardMeasurement"]

# What a rank tells the others of each piece of a parameter: norms of its gradient and residual; of
# the part in its shard the norm of the averaged gradient; and where the dense mean is known, norms
# of the error and of the dense mean, and the product of the two means.
_ROWS = ("gradient", "residual", "mean", "error", "dense", "dot")


class Compared(NamedTuple):
    """Holds sums over all ranks' shards, per piece of a parameter, on the CPU.

    Attributes:
        error, dense: squared norms of the dense mean minus the average, and of the dense mean.
        dot: the product of dense mean and average.
    """

    error: Tensor
    dense: Tensor
    dot: Tensor


class ShardMeasurement(Measurement):
    """Compares this rank's shard of the averaged gradient with the dense mean of that shard.

    Args:
        bucket, layout, gradient, scheme, step, dense: see :class:`Measurement`.
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
        *,
        dense: bool = False,
    ) -> None:
        super().__init__(bucket, layout, gradient, scheme, step, dense=dense)
        self.shards, self._rank = shards, rank

    def finish(self, mean: Tensor, memory: Memory) -> None:
        flat, residual = mean.detach().view(-1), torch.zeros_like(self._own)
        (begin, end), ranks = self.shards[self._rank], len(self.shards)
        sketches = []
        if self._keeps_residual:
            sent = self._difference.clone()
            residual = self._add_residual(sent, memory)
            # Of the mean over ranks, one rank subtracts all.
            sent[begin:end].sub_(flat, alpha=ranks)
            sketches.append(self._sketch(sent))
        else:
            residual = self._add_residual(self._difference, memory)
        self.rows = self._own.new_zeros(len(_ROWS), len(self.layout))
        self.rows[0], self.rows[1] = self._own, residual
        self._fill({"mean": flat})
        if self._dense:
            self._mean = flat
        else:
            sketches.append(self._sketch(self._difference))
            self._difference[begin:end].sub_(flat, alpha=ranks)
            sketches.append(self._sketch(self._difference))
            del self._difference  # as large as the gradient of all ranks
        self._note(sketches)

    def compare(self) -> Comparison:
        if not self._dense:
            return
        request = ReduceScatter(to_rows(self._difference, self.shards), "mean")
        arrived = yield request
        begin, end = self.shards[self._rank]
        dense = arrived.view(-1)[: end - begin]
        mean = self._mean.to(dense.dtype)
        self._fill({"error": dense - mean, "dense": dense})
        for column, cut in self._here():
            self.rows[_ROWS.index("dot"), column] = torch.dot(mean[cut], dense[cut])
        del self._difference, self._mean

    def _fill(self, vectors: Mapping[str, Tensor]) -> None:
        """Notes the norms of vectors that are as long as this rank's shard."""
        here = self._here()
        if not here:
            return
        columns = torch.tensor([column for column, _ in here], device=self.rows.device)
        sizes = [cut.stop - cut.start for _, cut in here]  # one after the other
        for name, flat in vectors.items():
            self.rows[_ROWS.index(name), columns] = norms_of(flat, sizes)

    def _here(self) -> list[tuple[int, slice]]:
        """Returns the pieces that are in this rank's shard, and where in it they are."""
        begin, end = self.shards[self._rank]
        found = []
        for column, (first, size) in enumerate(
            zip(self.layout.offsets, self.layout.sizes, strict=False)
        ):
            part = max(first, begin) - begin, min(first + size, end) - begin
            if part[0] < part[1]:
                found.append((column, slice(*part)))
        return found

    def operands(self) -> list[Tensor]:
        return []

    def compared(self, ranks: Tensor, sketches: Tensor) -> tuple[Compared, Tensor | None]:
        """Compares the averaged gradient with the dense mean.

        Args:
            ranks: the rows of all ranks.
            sketches: their mean over ranks, on the CPU.

        Returns:
            compared: sums for each piece.
            balance: norms of what the ranks have sent minus the average; None without feedback.
        """
        sizes, means = self.layout.sizes, [*sketches]
        balance = None
        if self._keeps_residual:
            sent = means.pop(0)
            balance = dots_of(sent, sent, sizes).sqrt()
        rows = {name: ranks[:, row] for row, name in enumerate(_ROWS)}
        if self._dense:
            error, dense = (rows[name].square().sum(0) for name in ("error", "dense"))
            return Compared(error, dense, rows["dot"].sum(0)), balance
        dense, error = means
        square, size = dots_of(error, error, sizes), rows["mean"].square().sum(0)
        # Dense mean = average + error. The norm of the average is known, so that only products with
        # the error, which mostly is the smaller one, are as inexact as sketches are.
        dot = size + dots_of(dense - error, error, sizes)
        return Compared(square, (2 * dot - size + square).clamp_min(0.0), dot), balance
