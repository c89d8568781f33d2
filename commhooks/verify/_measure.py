"""Measures one bucket of a verified step on one rank: differences, norms, hashes and sketches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from commhooks._torch import foreach_norms
from commhooks.core._layout import Layout, Span
from commhooks.core._memory import Memory, staged_in
from commhooks.core._names import is_padding, parameter_name
from commhooks.core._scheme import Scheme
from commhooks.kernels import squared_norms
from commhooks.verify._equal import hashes
from commhooks.verify._sketch import dots_of, sketches_of
from commhooks.wrappers._feedback import RESIDUAL, keeps_residual
from commhooks.wrappers._schedules import running_at

__all__ = [
    "ROW_FIELDS",
    "Errors",
    "Measurement",
    "Observer",
    "ShardErrors",
    "ShardMeasurement",
    "norms_of",
]

# A rank sends the others, for each parameter: norms of its gradient, of the averaged gradient,
# of their difference and of its residual, and the hash of the averaged gradient.
ROW_FIELDS = ("gradient", "mean", "difference", "residual", "hash")


class Observer(Protocol):
    """Observes the steps of an engine without changing their results."""

    def wants(self, step: int, scheme: Scheme) -> bool:
        """Whether the buckets of a step are to be measured."""

    def on_step_end(self, step: int, scheme: Scheme, measured: list[Measurement]) -> None:
        """Receives the measurements of a step in which no exchange failed."""


class Errors(NamedTuple):
    """Holds norms per parameter, on the CPU.

    Attributes:
        error: norms of the dense mean minus the average.
        balance: norms of the mean of what ranks sent minus the average; None without feedback.
        dense: norms of the dense mean, from its own sketch.
    """

    error: Tensor
    balance: Tensor | None
    dense: Tensor


class Measurement:
    """Compares the averaged gradient of one bucket with this rank's own.

    The mean over ranks of the gradient minus the average is the error of the averaged gradient: the
    dense mean minus the result of the exchange. One tensor thus serves as the copy of the gradient
    and as what the ranks sketch; they average the sketches.

    Attributes:
        bucket: the bucket's number in the ledger.
        layout: the bucket's parameters.
        rows: float64 of shape ``(len(ROW_FIELDS), parameters)``; hashes have the bits of integers.
        sketches: a row for each kind of vector whose mean over ranks is wanted.
        dtype: dtype of the gradient.
    """

    def __init__(
        self,
        bucket: int,
        layout: Layout,
        gradient: Tensor,
        scheme: Scheme,
        step: int = 0,
    ) -> None:
        self.sketches: Tensor
        self.bucket, self.layout, self.dtype = bucket, layout, gradient.dtype
        # Now, since the exchange may write its result over the gradient.
        self._difference = gradient.detach().to(_wide(gradient), copy=True).view(-1)
        self._step = step
        running = running_at(scheme, step)
        self._averages = running.traits.returns == "mean"  # otherwise there is no error to sketch
        self._keeps_residual = keeps_residual(running)

    def finish(self, mean: Tensor, memory: Memory) -> None:
        """Records the result of the exchange.

        Args:
            mean: the averaged gradient.
            memory: with the residual before this step, and the one that the step has staged.
        """
        flat, sizes = mean.detach().view(-1), self.layout.sizes
        averaged, bits = norms_of(flat, sizes), hashes(flat, sizes)
        gradient, residual, sent = self._sent(memory)
        self._difference.sub_(flat)
        difference = norms_of(self._difference, sizes)
        self.rows = torch.stack(
            [gradient, averaged, difference, residual, bits.view(torch.float64)]
        )
        if not self._averages:
            self._keep([])
            return
        # What the ranks have sent minus the average has a mean of zero, but for rounding.
        flats = [] if sent is None else [sent.sub_(flat)]
        self._keep([*flats, self._difference, flat.to(self._difference.dtype)])
        # All ranks have the average: its sketch is not sent.
        self.sketches, self._mean = self.sketches[:-1], self.sketches[-1]

    def _sent(self, memory: Memory) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns norms of this rank's contribution and of residuals, and the tensor that was sent.

        The tensor is None for a scheme that keeps no residual.
        """
        if not self._keeps_residual:
            # A residual that is flushed in this step is part of what the ranks have to average.
            residual = self._add_residual(self._difference, memory)
            return norms_of(self._difference, self.layout.sizes), residual, None
        sent = self._difference.clone()
        residual = self._add_residual(sent, memory)
        return norms_of(self._difference, self.layout.sizes), residual, sent

    def _add_residual(self, values: Tensor, memory: Memory) -> Tensor:
        """Adds the old residual, subtracts the new one, and returns the norms of both."""
        norms = values.new_zeros(len(self.layout), dtype=torch.float64)
        positions = {name: position for position, name in enumerate(self.layout.names)}
        for layout, *before_and_after in staged_in(memory, RESIDUAL):
            if layout.names[0] not in positions:  # of another bucket
                continue
            for flat, sign in zip(before_and_after, (1, -1), strict=True):
                if flat is None:
                    continue
                flat = flat.view(-1)
                sizes = norms_of(flat, layout.sizes)
                if layout.names == self.layout.names:
                    values.add_(flat, alpha=sign)
                    norms += sizes
                    continue
                views = self._views(values)  # a wrapper exchanges some of the bucket's parameters
                for name, part, size in zip(
                    layout.names, flat.split(layout.sizes), sizes, strict=True
                ):
                    views[positions[name]].add_(part, alpha=sign)
                    norms[positions[name]] += size
        return norms

    def _views(self, flat: Tensor) -> Sequence[Tensor]:
        views: Sequence[Tensor] = flat.split(self.layout.sizes)
        return views

    def _keep(self, flats: list[Tensor]) -> None:
        """Stores the sketches, and frees the copy of the gradient."""
        self.sketches = (
            sketches_of(flats, self.layout.sizes, self._step)
            if flats
            else self.rows.new_zeros((0, 0))
        )
        del self._difference

    def errors(self, sketches: Tensor) -> Errors:
        """Returns norms of the error, of the lost part and of the dense mean.

        Args:
            sketches: mean of the sketches over ranks, on the CPU.
        """
        sizes, (*sent, error) = self.layout.sizes, sketches
        balance = _norms(sent[0], sizes) if self._keeps_residual else None
        return Errors(_norms(error, sizes), balance, _norms(error + self._mean.cpu(), sizes))


def _norms(sketches: Tensor, sizes: Sequence[int]) -> Tensor:
    return dots_of(sketches, sketches, sizes).sqrt()


def norms_of(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the norms of successive parts of a flat tensor, in float64.

    Squares of float64 entries above 1e154 overflow; no others do.
    """
    # A loop over parts, each with calls of its own, took most of the time of a verified step.
    if flat.device.type != "cpu" or flat.dtype == torch.float64:
        return torch.stack(foreach_norms(flat.split(list(sizes)), 2, dtype=torch.float64))
    squares = torch.empty(len(sizes), dtype=torch.float64, device="cpu")
    # A scheme's own view may have gaps, which kernels do not know of.
    squared_norms(flat.contiguous(), squares, tuple(sizes))
    return squares.sqrt_()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# ---- where each rank has its shard of the mean alone


# The same where each rank has its shard of the mean alone: norms of its gradient and residual, and
# of the averaged gradient in its shard.
_SHARD_ROW_FIELDS = ("gradient", "residual", "mean")


class ShardErrors(NamedTuple):
    """Holds the errors of the averages of all shards, on the CPU.

    Attributes:
        error, norm, mean: norms of the error, of the dense mean and of the average, per parameter.
        dot: the products of dense mean and average, per parameter.
        parts: norms of the parts of the bounded error; with feedback, of the lost part of the sum.
        locate: returns, for the number of a part, its parameter and the ranks that have it in their
            shards.
    """

    error: Tensor
    norm: Tensor
    mean: Tensor
    dot: Tensor
    parts: Tensor
    locate: Callable[[int], tuple[str, list[int]]]


class ShardMeasurement(Measurement):
    """Compares this rank's shard of the averaged gradient with the dense mean of that shard.

    Args:
        bucket, layout, gradient, scheme, step: see :class:`Measurement`.
        shards: begin and end of the shard of each rank.
        rank: this process's rank.
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
        # Rows are of whole parameters: of all pieces, there would be ranks times as many.
        names = [parameter_name(name) for name in layout.names if not is_padding(name)]
        self.names = [*dict.fromkeys(names)]
        numbers = {name: number for number, name in enumerate(self.names)}
        self._owners = {
            piece: numbers[parameter_name(name)]
            for piece, name in enumerate(layout.names)
            if not is_padding(name)
        }

    def finish(self, mean: Tensor, memory: Memory) -> None:
        flat = mean.detach().view(-1)
        (begin, end), ranks = self.shards[self._rank], len(self.shards)
        gradient, residual, sent = self._sent(memory)
        self.rows = gradient.new_zeros(len(_SHARD_ROW_FIELDS), len(self.names))
        everywhere = range(len(self.layout))
        self._fill("gradient", everywhere, gradient)
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
        error = self._difference.clone()
        error[begin:end].sub_(flat, alpha=ranks)
        self._keep([*flats, self._difference, error])

    def _fill_shard(self, name: str, flat: Tensor) -> None:
        """Records the norms of a vector that is as long as this rank's shard."""
        here = self._here()
        if here:
            sizes = [cut.stop - cut.start for _, cut in here]  # one after the other
            self._fill(name, [piece for piece, _ in here], norms_of(flat, sizes))

    def _fill(self, name: str, pieces: Sequence[int], norms: Tensor) -> None:
        """Records the norms of whole parameters, given those of some pieces."""
        which = [place for place, piece in enumerate(pieces) if piece in self._owners]
        owners = [self._owners[pieces[place]] for place in which]
        places, into = (
            torch.tensor(indices, dtype=torch.int64, device=norms.device)
            for indices in (which, owners)
        )
        squares = norms.new_zeros(len(self.names))
        if which:
            squares.index_add_(0, into, norms[places].square())
        self.rows[_SHARD_ROW_FIELDS.index(name)] = squares.sqrt()

    def _here(self) -> list[tuple[int, slice]]:
        """Returns the pieces in this rank's shard, and their positions in the shard."""
        begin, end = self.shards[self._rank]
        pieces = []
        spans = zip(self.layout.offsets, self.layout.sizes, strict=False)
        for piece, (first, size) in enumerate(spans):
            part = max(first, begin) - begin, min(first + size, end) - begin
            if part[0] < part[1]:
                pieces.append((piece, slice(*part)))
        return pieces

    def compared(self, ranks: Tensor, sketches: Tensor) -> ShardErrors:
        """Compares the averaged gradient with the dense mean.

        Args:
            ranks: the rows of all ranks.
            sketches: mean of the sketches over ranks, on the CPU.
        """
        *sent, dense, difference = sketches
        sizes, average = self.layout.sizes, dense - difference
        errors = dots_of(difference, difference, sizes)
        error, norm = self._summed(errors), self._summed(dots_of(dense, dense, sizes))
        near = self._summed(dots_of(average, difference, sizes))
        far = self._summed(dots_of(average, dense, sizes))
        mean = ranks[:, _SHARD_ROW_FIELDS.index("mean")].square().sum(0)
        # The norm of the average is exact. Products are off by a share of their factors, so that
        # of average = dense mean - error the smaller one is taken.
        dot = torch.where(error < norm, mean + near, far)
        norm = torch.where(error < norm, mean + 2 * near + error, norm).clamp_min(0.0)
        parts = dots_of(sent[0], sent[0], sizes) if sent else errors
        return ShardErrors(error.sqrt(), norm.sqrt(), mean.sqrt(), dot, parts.sqrt(), self._piece)

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
        return parameter_name(self.layout.names[number]), ranks
