"""Schemes that change with the step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks._feedback import flushing, keeps_residual, take_residual
from commhooks._scheme import Context, Scheme, SchemeExchange
from commhooks._wrapper import Wrapper, any_error, need_scheme
from commhooks.schemes.dense import Dense

__all__ = ["DelayedStart", "PeriodicDense"]


@dataclass(frozen=True)
class DelayedStart(Wrapper):
    """Runs ``before`` until step ``start_step``, then ``scheme``.

    Early gradients change fast and compress badly; a tenth of the training is a usual start.

    Args:
        scheme: runs from step ``start_step`` on (steps count from 0).
        start_step: number of dense steps first.
        before: what runs until then; the dense all-reduce.

    Reference: Vogels et al., PowerSGD, 2019 (warm-up).
    """

    scheme: Scheme
    start_step: int
    before: Scheme = field(default_factory=Dense)

    def __post_init__(self) -> None:
        super().__post_init__()
        need_scheme(self, self.before)
        if not isinstance(self.start_step, int) or self.start_step < 0:
            raise ValueError(
                f"DelayedStart(start_step=...) is a number of steps, 0 or more, "
                f"got {self.start_step!r}"
            )

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return max(self.scheme.rounds, self.before.rounds)

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.scheme.stateful or self.before.stateful

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        return any_error((self.scheme, self.before), key, value, parameter)

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        scheme = self.before if ctx.step < self.start_step else self.scheme
        if scheme is self.scheme and keeps_residual(self.before):
            scheme = flushing(scheme)
        return (yield from scheme.exchange(grad, ctx))


@dataclass(frozen=True)
class PeriodicDense(Wrapper):
    """Exchanges every so many steps densely, with all that error feedback has held back.

    Bounds how late anything arrives, and how long an approximation can mislead, for
    ``1 / every`` of the dense bytes.

    Args:
        scheme: runs in all other steps.
        every: a dense step comes every so many; 2 or more.

    Example:
        >>> hook = register(ddp_model, PeriodicDense(make("onebit"), every=50))
    """

    scheme: Scheme
    every: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 2:
            raise ValueError(
                f"PeriodicDense(every=...) is a number of steps, 2 or more, got {self.every!r}"
            )

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return max(1, self.scheme.rounds)

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        if (ctx.step + 1) % self.every:
            return (yield from self.scheme.exchange(grad, ctx))
        if keeps_residual(self.scheme):
            take_residual(grad, ctx)
        return (yield from Dense().exchange(grad, ctx))
