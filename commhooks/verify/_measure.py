"""Measures one bucket of a verified step on one rank: norms, a hash and sketches of differences.

The mean of the ranks' sketches is the sketch of their mean. So the norm of a mean is known, up to
some percent, from a message that is a small fraction of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from commhooks.core._layout import Layout, Span
from commhooks.core._memory import Memory, staged_in
from commhooks.core._names import is_padding, parameter_name
from commhooks.core._scheme import Scheme
from commhooks.kernels import fingerprint, pieces_of_sizes, sketch_width
from commhooks.kernels.fingerprint import ROWS
from commhooks.wrappers._feedback import RESIDUAL, keeps_residual
from commhooks.wrappers._schedules import running_at

__all__ = [
    "Errors",
    "Measurement",
    "Observer",
    "ShardErrors",
    "ShardMeasurement",
    "dots_of",
]


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
    dense mean minus the result of the exchange. The ranks average sketches of it.

    Attributes:
        bucket: the bucket's number in the ledger.
        layout: the bucket's parameters.
        rows: what :func:`fingerprint` finds of each parameter; all ranks get it.
        sketches: a row for each kind of vector whose mean over ranks is compared.
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
        self.rows: Tensor
        self.sketches: Tensor
        self.bucket, self.layout, self.dtype = bucket, layout, gradient.dtype
        # Now, since the exchange may write its result over the gradient.
        self._gradient = gradient.detach().to(_wide(gradient), copy=True).view(-1)
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
        sketches = self._compare(mean, memory)
        # All ranks have the average: its sketch is not sent.
        self.sketches, self._mean = sketches[:-1], sketches[-1]

    def _compare(
        self,
        mean: Tensor,
        memory: Memory,
        owners: tuple[int, ...] | None = None,
        begin: int = 0,
        factor: float = 1.0,
    ) -> Tensor:
        """Fills the rows, frees the copy of the gradient, and returns the sketches.

        If the scheme keeps a residual, the first sketch is of what this rank has sent minus the
        average, whose mean over ranks is zero but for rounding. The other two are of gradient minus
        average, and of the average.
        """
        pieces = pieces_of_sizes(tuple(self.layout.sizes), owners)
        gradient, kinds = self._gradient, 2 + self._keeps_residual
        self.rows = gradient.new_empty((len(ROWS), pieces.owner_count), dtype=torch.float64)
        sketches = gradient.new_empty((kinds, pieces.width)) if self._averages else None
        fingerprint(
            gradient,
            _converted(mean, gradient),
            self.rows,
            sketches,
            pieces,
            self._step,
            residuals=self._residuals(memory),
            # Otherwise a residual may be flushed in this step, and is part of the gradient.
            keeps=self._keeps_residual,
            begin=begin,
            factor=factor,
        )
        del self._gradient
        return gradient.new_empty((kinds, 0)) if sketches is None else sketches

    def _residuals(self, memory: Memory) -> tuple[Tensor | None, Tensor | None]:
        """Returns the residuals of the whole bucket before the step, and after it."""
        names = set(self.layout.names)
        staged = [each for each in staged_in(memory, RESIDUAL) if each[0].names[0] in names]
        if len(staged) == 1 and staged[0][0].names == self.layout.names:
            return self._whole(staged[0][1]), self._whole(staged[0][2])
        # A wrapper exchanges some of the bucket's parameters.
        before, after = (
            self._joined([(layout, both[place]) for layout, *both in staged]) for place in (0, 1)
        )
        return before, after

    def _whole(self, flat: Tensor | None) -> Tensor | None:
        return None if flat is None else flat.view(-1).to(self._gradient.dtype)

    def _joined(self, residuals: Sequence[tuple[Layout, Tensor | None]]) -> Tensor | None:
        """Joins residuals of some parameters; the others have none."""
        parts: dict[str, Tensor] = {}
        for layout, flat in residuals:
            if flat is not None:
                parts |= zip(layout.names, flat.view(-1).split(layout.sizes), strict=True)
        if not parts:
            return None
        zeros = self._gradient.new_zeros(max(self.layout.sizes))
        pairs = zip(self.layout.names, self.layout.sizes, strict=True)
        return self._whole(torch.cat([parts.get(name, zeros[:size]) for name, size in pairs]))

    def errors(self, sketches: Tensor) -> Errors:
        """Returns norms of the error, of the lost part and of the dense mean.

        Args:
            sketches: mean of the sketches over ranks, on the CPU.
        """
        sizes, (*sent, error) = self.layout.sizes, sketches
        balance = _norms(sent[0], sizes) if self._keeps_residual else None
        return Errors(_norms(error, sizes), balance, _norms(error + self._mean.cpu(), sizes))


def _converted(mean: Tensor, gradient: Tensor) -> Tensor:
    """Returns the average as :func:`fingerprint` takes it beside this gradient."""
    mean = mean.detach().contiguous()  # a scheme's own view may have gaps
    is_double = torch.float64 in (mean.dtype, gradient.dtype)
    return mean.to(gradient.dtype) if is_double else mean


def _norms(sketches: Tensor, sizes: Sequence[int]) -> Tensor:
    return dots_of(sketches, sketches, sizes).sqrt()


def dots_of(sketches: Tensor, other_sketches: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the scalar products of vectors by their sketches, in float64, on the CPU.

    Args:
        sketches, other_sketches: sketches of :func:`fingerprint`, or sums of them.
        sizes: numbers of entries of the vectors.
    """
    products = sketches.double() * other_sketches.double()
    # Not differences of one running sum, in which small products behind large ones are lost.
    widths = torch.tensor([sketch_width(size) for size in sizes], device="cpu")
    owners = torch.arange(len(sizes), device="cpu").repeat_interleave(widths)
    return products.new_zeros(len(sizes)).index_add_(0, owners, products)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# ---- where each rank has its shard of the mean alone


# The rows that ranks send: a difference or a hash of whole parameters needs the whole average.
_SHARD_ROWS = ROWS[:3]


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
        # Rows are of whole parameters: there are as many pieces as parameters times ranks.
        names = [parameter_name(name) for name in layout.names if not is_padding(name)]
        self.names = [*dict.fromkeys(names)]
        numbers = {name: number for number, name in enumerate(self.names)}
        self._owners = tuple(
            -1 if is_padding(name) else numbers[parameter_name(name)] for name in layout.names
        )

    def finish(self, mean: Tensor, memory: Memory) -> None:
        # One rank alone has this shard of the average. It subtracts it as often as there are ranks,
        # since the mean over ranks divides it by their number.
        begin, ranks = self.shards[self._rank][0], len(self.shards)
        self.sketches = self._compare(mean, memory, self._owners, begin, ranks)
        self.rows = self.rows[: len(_SHARD_ROWS)]

    def compared(self, ranks: Tensor, sketches: Tensor) -> ShardErrors:
        """Compares the averaged gradient with the dense mean.

        Args:
            ranks: the rows of all ranks.
            sketches: mean of the sketches over ranks, on the CPU.
        """
        *sent, difference, average = sketches
        sizes, dense = self.layout.sizes, difference + average
        errors = dots_of(difference, difference, sizes)
        error, norm = self._summed(errors), self._summed(dots_of(dense, dense, sizes))
        near = self._summed(dots_of(average, difference, sizes))
        far = self._summed(dots_of(average, dense, sizes))
        mean = ranks[:, ROWS.index("mean")].sum(0)
        # The norm of the average is exact. Products are off by a share of their factors, so that
        # of average = dense mean - error the smaller one is taken.
        dot = torch.where(error < norm, mean + near, far)
        norm = torch.where(error < norm, mean + 2 * near + error, norm).clamp_min(0.0)
        parts = dots_of(sent[0], sent[0], sizes) if sent else errors
        return ShardErrors(error.sqrt(), norm.sqrt(), mean.sqrt(), dot, parts.sqrt(), self._piece)

    def _summed(self, of_pieces: Tensor) -> Tensor:
        """Returns sums over the pieces of each parameter."""
        owners = torch.tensor(self._owners, dtype=torch.int64, device="cpu")
        sums = of_pieces.new_zeros(len(self.names))
        return sums.index_add_(0, owners[owners >= 0], of_pieces[owners >= 0])

    def _piece(self, number: int) -> tuple[str, list[int]]:
        """Returns the parameter of a piece, and the ranks that have some of it in their shards."""
        first, size = self.layout.offsets[number], self.layout.sizes[number]
        spans = enumerate(self.shards)
        ranks = [rank for rank, (a, b) in spans if a < first + size and first < b]
        return parameter_name(self.layout.names[number]), ranks
