"""Measures one bucket of a verified step on one rank: differences, norms and hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.core.scheme import Scheme
from commhooks.wrappers.feedback import RESIDUAL, keeps_residual

__all__ = ["ROWS", "Measurement", "Observer"]

# What a rank tells the others of each parameter: norms of its gradient, of the averaged gradient,
# of their difference and of its residual, and the hash of the averaged gradient.
ROWS = ("gradient", "mean", "difference", "residual", "hash")
_CHUNK = 2**20  # entries that are hashed at a time, so that integers of 64 bits take little memory


class Observer(Protocol):
    """Takes part in the steps of an engine without a change to what they compute."""

    def wants(self, step: int, scheme: Scheme) -> bool:
        """Whether the buckets of a step are to be measured."""

    def step_over(self, step: int, scheme: Scheme, measured: list[Measurement]) -> None:
        """Takes the measurements of a step in which no exchange failed."""


class Measurement:
    """Compares the averaged gradient of one bucket with this rank's own.

    The mean over ranks of ``difference`` is the error of the averaged gradient: the dense mean
    minus the result of the exchange. One tensor thus serves as the copy of the gradient and as the
    operand of the all-reduce.

    Attributes:
        bucket: the bucket's number in the ledger.
        layout: its parameters.
        difference: gradient minus average, flat, in float32 (float64 if the gradient is).
        balance: the same with the residual: the mean over ranks of what each has sent minus the
            average, which is zero but for rounding; None for schemes that keep no residual.
        rows: float64 of shape ``(len(ROWS), parameters)``; the hashes' bits are those of integers.
        dtype: of the gradient.
    """

    def __init__(self, bucket: int, layout: Layout, gradient: Tensor, scheme: Scheme) -> None:
        self.bucket, self.layout, self.dtype = bucket, layout, gradient.dtype
        wide = torch.promote_types(gradient.dtype, torch.float32)
        # Now, since the exchange may write its result over the gradient.
        self.difference = gradient.detach().to(wide, copy=True).view(-1)
        self.balance: Tensor | None = None
        self._keeps_residual = keeps_residual(scheme)
        self._own = _norms(self._views(self.difference))

    def finish(self, mean: Tensor, memory: Memory) -> None:
        """Notes the result of the exchange.

        Args:
            mean: the averaged gradient.
            memory: with the residual before this step, and the one that the step has staged.
        """
        flat, zeros = mean.detach().view(-1), torch.zeros_like(self._own)
        averaged, hashes = _norms(self._views(flat)), _hashes(flat, self.layout.sizes)
        residual = zeros
        if self._keeps_residual:
            self.balance = self.difference.clone()
            residual = self._add_residual(self.balance, memory)
        else:
            # A residual that is flushed in this step is part of what the ranks have to average.
            residual = self._add_residual(self.difference, memory)
        self.difference.sub_(flat)
        if self.balance is not None:
            self.balance.sub_(flat)
        away = _norms(self._views(self.difference))
        self.rows = torch.stack(
            [self._own, averaged, away, residual, hashes.view(torch.float64)]
        )

    def _add_residual(self, values: Tensor, memory: Memory) -> Tensor:
        """Adds the residual, subtracts the one that the step leaves, returns the norms of both."""
        places = dict(zip(self.layout.names, self._views(values), strict=True))
        norms = dict.fromkeys(self.layout.names, values.new_zeros((), dtype=torch.float64))
        for name, new in memory.staged(RESIDUAL):
            view = places.get(name)
            if view is None:
                continue
            for value, sign in ((memory.get(RESIDUAL, name), 1), (new, -1)):
                if value is not None:
                    flat = value.reshape(-1).to(view.device)
                    view.add_(flat, alpha=sign)
                    norms[name] = norms[name] + torch.linalg.vector_norm(flat, dtype=torch.float64)
        return torch.stack([norms[name] for name in self.layout.names])

    def _views(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split(self.layout.sizes)

    def operands(self) -> list[Tensor]:
        """Returns the tensors of which the mean over ranks is to be computed, in place."""
        return [self.difference] if self.balance is None else [self.difference, self.balance]

    def errors(self) -> tuple[Tensor, Tensor | None]:
        """Returns the norms of ``difference`` and ``balance`` per parameter, on the CPU."""
        balance = None if self.balance is None else _norms(self._views(self.balance)).cpu()
        return _norms(self._views(self.difference)).cpu(), balance


def _norms(views: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each tensor; summed in float64, where no square overflows."""
    return torch.stack(torch._foreach_norm(list(views), 2, dtype=torch.float64))


def _hashes(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns 64 bits per parameter that depend on every bit and on every position."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    # Odd multipliers, modulo 2^64: a change of one entry always changes the sum.
    weights = torch.arange(min(len(flat), _CHUNK), device=flat.device).mul_(2).add_(1)
    weights = weights.mul_(0x5851F42D4C957F2D)
    sums: list[list[Tensor]] = [[] for _ in sizes]
    parameter, left = 0, sizes[0] if sizes else 0
    for number, chunk in enumerate(flat.split(_CHUNK)):
        spans = []
        room = len(chunk)
        while room:
            while not left:
                parameter, left = parameter + 1, sizes[parameter + 1]
            taken = min(room, left)
            spans.append((parameter, taken))
            room, left = room - taken, left - taken
        # Zero has two forms, which count as equal.
        bits = chunk.add(0.0).view(integer).to(torch.int64).mul_(weights[: len(chunk)])
        parts = bits.split([taken for _, taken in spans])
        for (owner, _), part in zip(spans, parts, strict=True):
            sums[owner].append(part.sum() * (2 * number + 1))
    none = torch.zeros((), dtype=torch.int64, device=flat.device)
    return torch.stack([sum(some, none) for some in sums])
