"""Measures one bucket of a verified step where each rank gets its shard of the mean alone.

No copy of a gradient is kept until the step is over: the ranks average sketches, or the dense mean
of the shard comes by one more reduce-scatter in the bucket's own exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.core.names import is_padding, whole_name
from commhooks.core.scheme import Scheme
from commhooks.core.shards import Span, to_rows
from commhooks.hook.measurement import Comparison, Measurement, norms_of
from commhooks.hook.sketch import dots_of
from ddp_core import ReduceScatter

__all__ = ["Compared", "ShardMeasurement"]

# What a rank tells the others of each parameter: norms of its gradient and residual; of the part in
# its shard the norm of the averaged gradient; and where the dense mean is known, norms of the error
# and of the dense mean, and the product of the two means.
_ROWS = ("gradient", "residual", "mean", "error", "dense", "dot")


class Compared(NamedTuple):
    """Holds how far the averages of all shards are from the dense mean, on the CPU.

    Attributes:
        error, norm, mean: norms of the error, of the dense mean and of the average, per parameter.
        dot: the products of dense mean and average, per parameter.
        parts: norms of parts of what a law limits: of the error, or of what got lost where feedback
            keeps it.
        place: returns, for the number of a part, its parameter and the ranks that have it in their
            shards.
    """

    error: Tensor
    norm: Tensor
    mean: Tensor
    dot: Tensor
    parts: Tensor
    place: Callable[[int], tuple[str, list[int]]]


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
        # Rows are of whole parameters: of all pieces, there would be ranks times as many.
        names = [whole_name(name) for name in layout.names if not is_padding(name)]
        self.names = [*dict.fromkeys(names)]
        numbers = {name: number for number, name in enumerate(self.names)}
        self._owners = {
            piece: numbers[whole_name(name)]
            for piece, name in enumerate(layout.names)
            if not is_padding(name)
        }

    def finish(self, mean: Tensor, memory: Memory) -> None:
        flat = mean.detach().view(-1)
        (begin, end), ranks = self.shards[self._rank], len(self.shards)
        own, residual, sent = self._sent(memory)
        self.rows = own.new_zeros(len(_ROWS), len(self.names))
        everywhere = range(len(self.layout))
        self._fill("gradient", everywhere, own)
        self._fill("residual", everywhere, residual)
        self._fill_shard("mean", flat)
        if not self._averages:
            self._keep([])
            return
        flats = []
        if sent is not None:
            # Of the mean over ranks, one rank subtracts all.
            sent[begin:end].sub_(flat, alpha=ranks)
            flats.append(sent)
        if self._dense:
            self._mean = flat
        else:
            error = self._difference.clone()
            error[begin:end].sub_(flat, alpha=ranks)
            flats += [self._difference, error]
        self._keep(flats)

    def compare(self) -> Comparison:
        if not (self._dense and self._averages):
            return
        request = ReduceScatter(to_rows(self._difference, self.shards), "mean")
        arrived = yield request
        begin, end = self.shards[self._rank]
        dense = arrived.view(-1)[: end - begin]
        mean = self._mean.to(dense.dtype)
        self._fill_shard("error", dense - mean)
        self._fill_shard("dense", dense)
        dots = self.rows[_ROWS.index("dot")]
        for piece, cut in self._here():
            if piece in self._owners:
                dots[self._owners[piece]] += torch.dot(mean[cut], dense[cut])
        del self._difference, self._mean  # as large as the gradient of all ranks

    def _fill_shard(self, name: str, flat: Tensor) -> None:
        """Notes the norms of a vector that is as long as this rank's shard."""
        here = self._here()
        if here:
            sizes = [cut.stop - cut.start for _, cut in here]  # one after the other
            self._fill(name, [piece for piece, _ in here], norms_of(flat, sizes))

    def _fill(self, name: str, pieces: Sequence[int], norms: Tensor) -> None:
        """Notes the norms of whole parameters, given those of some pieces."""
        which = [place for place, piece in enumerate(pieces) if piece in self._owners]
        owners = [self._owners[pieces[place]] for place in which]
        places, into = (
            torch.tensor(one, dtype=torch.int64, device=norms.device) for one in (which, owners)
        )
        squares = norms.new_zeros(len(self.names))
        if which:
            squares.index_add_(0, into, norms[places].square())
        self.rows[_ROWS.index(name)] = squares.sqrt()

    def _here(self) -> list[tuple[int, slice]]:
        """Returns the pieces that are in this rank's shard, and where in it they are."""
        begin, end = self.shards[self._rank]
        found = []
        spans = zip(self.layout.offsets, self.layout.sizes, strict=False)
        for piece, (first, size) in enumerate(spans):
            part = max(first, begin) - begin, min(first + size, end) - begin
            if part[0] < part[1]:
                found.append((piece, slice(*part)))
        return found

    def operands(self) -> list[Tensor]:
        return []

    def compared(self, ranks: Tensor, sketches: Tensor) -> Compared:
        """Compares the averaged gradient with the dense mean.

        Args:
            ranks: the rows of all ranks.
            sketches: their mean over ranks, on the CPU.
        """
        means = [*sketches]
        balance = means.pop(0) if self._keeps_residual else None
        found = self._of_rows(ranks) if self._dense else self._of_sketches(ranks, *means)
        if balance is None:
            return found
        sizes = self.layout.sizes
        return found._replace(parts=dots_of(balance, balance, sizes).sqrt(), place=self._piece)

    def _of_rows(self, ranks: Tensor) -> Compared:
        """Compares by what each rank knows of its shard of the dense mean."""
        rows = {name: ranks[:, row] for row, name in enumerate(_ROWS)}
        error, norm, mean = (
            rows[name].square().sum(0).sqrt() for name in ("error", "dense", "mean")
        )

        def place(part: int) -> tuple[str, list[int]]:
            rank, number = divmod(part, len(self.names))
            return self.names[number], [rank]

        return Compared(error, norm, mean, rows["dot"].sum(0), rows["error"].reshape(-1), place)

    def _of_sketches(self, ranks: Tensor, dense: Tensor, away: Tensor) -> Compared:
        """Compares by sketches of the dense mean and of the error."""
        sizes, average = self.layout.sizes, dense - away
        errors = dots_of(away, away, sizes)
        error, norm = self._summed(errors), self._summed(dots_of(dense, dense, sizes))
        near = self._summed(dots_of(average, away, sizes))
        far = self._summed(dots_of(average, dense, sizes))
        mean = ranks[:, _ROWS.index("mean")].square().sum(0)
        # The norm of the average is exact. Products are off by a share of their factors, so that
        # of average = dense mean - error the smaller one is taken.
        dot = torch.where(error < norm, mean + near, far)
        norm = torch.where(error < norm, mean + 2 * near + error, norm).clamp_min(0.0)
        return Compared(error.sqrt(), norm.sqrt(), mean.sqrt(), dot, errors.sqrt(), self._piece)

    def _summed(self, of_pieces: Tensor) -> Tensor:
        """Returns sums over the pieces of each parameter."""
        into, places = [*self._owners.values()], [*self._owners]
        sums = of_pieces.new_zeros(len(self.names))
        owners = torch.tensor(into, dtype=torch.int64, device=of_pieces.device)
        return sums.index_add_(0, owners, of_pieces[places]) if places else sums

    def _piece(self, number: int) -> tuple[str, list[int]]:
        """Returns the parameter of a piece, and the ranks that have some of it in their shards."""
        first, size = self.layout.offsets[number], self.layout.sizes[number]
        spans = enumerate(self.shards)
        ranks = [rank for rank, (a, b) in spans if a < first + size and first < b]
        return whole_name(self.layout.names[number]), ranks
