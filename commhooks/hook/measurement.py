"""Measures one bucket of a verified step on one rank: differences, norms and hashes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from commhooks._torch import foreach_norms
from commhooks.core.layout import Layout
from commhooks.core.memory import Memory, staged_in
from commhooks.core.scheme import Scheme
from commhooks.hook.equal import hashes
from commhooks.hook.sketch import dots_of, sketches_of
from commhooks.kernels import squared_norms
from commhooks.wrappers.feedback import RESIDUAL, keeps_residual
from commhooks.wrappers.schedules import running_at
from ddp_core import Collective

__all__ = ["ROWS", "Comparison", "Errors", "Measurement", "Observer", "norms_of"]

# What a rank tells the others of each parameter: norms of its gradient, of the averaged gradient,
# of their difference and of its residual, and the hash of the averaged gradient.
ROWS = ("gradient", "mean", "difference", "residual", "hash")

Comparison = Generator[Collective, Tensor, None]


class Observer(Protocol):
    """Takes part in the steps of an engine without a change to what they compute.

    Attributes:
        dense: compares with the dense mean itself, and not with a sketch of it.
    """

    dense: bool

    def wants(self, step: int, scheme: Scheme) -> bool:
        """Whether the buckets of a step are to be measured."""

    def step_over(self, step: int, scheme: Scheme, measured: list[Measurement]) -> None:
        """Takes the measurements of a step in which no exchange failed."""


class Errors(NamedTuple):
    """Holds norms per parameter, on the CPU.

    Attributes:
        error: of the dense mean minus the average.
        balance: of what the ranks have sent minus the average; None without error feedback.
        dense: of the dense mean, from its own sketch; None where the error is known exactly.
    """

    error: Tensor
    balance: Tensor | None
    dense: Tensor | None


class Measurement:
    """Compares the averaged gradient of one bucket with this rank's own.

    The mean over ranks of the gradient minus the average is the error of the averaged gradient: the
    dense mean minus the result of the exchange. One tensor thus serves as the copy of the gradient
    and as what the ranks average, or sketch and average the sketches of.

    Attributes:
        bucket: the bucket's number in the ledger.
        layout: its parameters.
        rows: float64 of shape ``(len(ROWS), parameters)``; the hashes' bits are those of integers.
        sketches: a row for each kind of vector whose mean over ranks is wanted.
        dtype: of the gradient.

    Args:
        dense: asks for the mean of the differences themselves, and not of their sketches.
    """

    def __init__(
        self,
        bucket: int,
        layout: Layout,
        gradient: Tensor,
        scheme: Scheme,
        step: int = 0,
        *,
        dense: bool = False,
    ) -> None:
        self.sketches: Tensor
        self.bucket, self.layout, self.dtype = bucket, layout, gradient.dtype
        # Now, since the exchange may write its result over the gradient.
        self._difference = gradient.detach().to(_wide(gradient), copy=True).view(-1)
        self._step, self._dense = step, dense
        running = running_at(scheme, step)
        self._averages = running.traits.returns == "mean"  # otherwise there is no error to sketch
        self._keeps_residual = keeps_residual(running)

    def finish(self, mean: Tensor, memory: Memory) -> None:
        """Notes the result of the exchange.

        Args:
            mean: the averaged gradient.
            memory: with the residual before this step, and the one that the step has staged.
        """
        flat, sizes = mean.detach().view(-1), self.layout.sizes
        averaged, bits = norms_of(flat, sizes), hashes(flat, sizes)
        own, residual, sent = self._sent(memory)
        self._difference.sub_(flat)
        away = norms_of(self._difference, sizes)
        self.rows = torch.stack([own, averaged, away, residual, bits.view(torch.float64)])
        if not self._averages:
            self._keep([])
            return
        # What the ranks have sent minus the average has a mean of zero, but for rounding.
        flats = [] if sent is None else [sent.sub_(flat)]
        if not self._dense:
            flats += [self._difference, flat.to(self._difference.dtype)]
        self._keep(flats)
        if not self._dense:
            # All ranks have the average: its sketch is not sent.
            self.sketches, self._mean = self.sketches[:-1], self.sketches[-1]

    def compare(self) -> Comparison:
        """Asks for what the comparison needs while the bucket is exchanged: nothing."""
        yield from ()

    def _sent(self, memory: Memory) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns norms of what is to be averaged and of residuals, and what this rank has sent.

        The last is None for a scheme that keeps no residual.
        """
        if not self._keeps_residual:
            # A residual that is flushed in this step is part of what the ranks have to average.
            residual = self._add_residual(self._difference, memory)
            return norms_of(self._difference, self.layout.sizes), residual, None
        sent = self._difference.clone()
        residual = self._add_residual(sent, memory)
        return norms_of(self._difference, self.layout.sizes), residual, sent

    def _add_residual(self, values: Tensor, memory: Memory) -> Tensor:
        """Adds the residual, subtracts the one that the step leaves, returns the norms of both."""
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
                own = self._views(values)  # a wrapper exchanges some of the bucket's parameters
                for name, part, size in zip(
                    layout.names, flat.split(layout.sizes), sizes, strict=True
                ):
                    own[positions[name]].add_(part, alpha=sign)
                    norms[positions[name]] += size
        return norms

    def _views(self, flat: Tensor) -> Sequence[Tensor]:
        views: Sequence[Tensor] = flat.split(self.layout.sizes)
        return views

    def _keep(self, flats: list[Tensor]) -> None:
        """Keeps sketches of what the ranks will compare, and no copy of the gradient beside."""
        self.sketches = (
            sketches_of(flats, self.layout.sizes, self._step)
            if flats
            else self.rows.new_zeros((0, 0))
        )
        if not (self._dense and self._averages):
            del self._difference

    def operands(self) -> list[Tensor]:
        """Returns the tensors besides ``sketches`` whose mean is to be computed, in place."""
        return [self._difference] if self._dense else []

    def errors(self, sketches: Tensor) -> Errors:
        """Returns norms of the error, of what got lost and of the dense mean.

        Args:
            sketches: their mean over ranks, on the CPU.
        """
        sizes, means = self.layout.sizes, [*sketches]
        balance = _norms(means.pop(0), sizes) if self._keeps_residual else None
        if self._dense:
            return Errors(norms_of(self._difference, sizes).cpu(), balance, None)
        (error,) = means
        return Errors(_norms(error, sizes), balance, _norms(error + self._mean.cpu(), sizes))


def _norms(sketches: Tensor, sizes: Sequence[int]) -> Tensor:
    return dots_of(sketches, sketches, sizes).sqrt()


def norms_of(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the norm of each of successive parts, in float64.

    No square overflows but those of float64 entries above 1e154.
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
