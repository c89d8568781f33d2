"""Schemes around a scheme: error feedback, delayed start, coalescing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks._scheme import Context, Scheme, SchemeExchange, walk
from commhooks.schemes.dense import Dense

__all__ = [
    "RESIDUAL",
    "Coalesced",
    "DelayedStart",
    "ErrorFeedback",
    "FlushResidual",
    "Wrapper",
    "any_error",
    "flushing",
    "keeps_residual",
    "need_scheme",
]

RESIDUAL = "residual"


def need_scheme(owner: object, scheme: object) -> None:
    if not isinstance(scheme, Scheme):
        name = type(owner).__name__
        raise TypeError(
            f"{name}(scheme) wraps a Scheme, got {scheme!r}: "
            f"use commhooks.make(name, ...) for a name"
        )


class Wrapper(Scheme):
    """A scheme around one scheme; takes over its flags."""

    scheme: Scheme

    def __post_init__(self) -> None:
        need_scheme(self, self.scheme)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return self.scheme.rounds

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return self.scheme.biased

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.scheme.linear

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.scheme.stateful

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.scheme.averages

    @property
    def coalesce(self) -> bool:  # type: ignore[override]
        return self.scheme.coalesce

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        return self.scheme.bucket_group(name, shape, dtype)

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        return self.scheme.memory_error(key, value, parameter)

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        return self.scheme.initial_memory(name, shape, ctx)


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Adds to each gradient what earlier steps did not send: ``c = g + e; e = c - sent(c)``.

    The residual ``e`` is kept per rank and parameter in float32 (float64 for float64 gradients).
    A step in which any gradient of any rank is not finite leaves it as it was.
    On the CPU two gradient-sized buffers are kept, one of them the next step's scratch.

    Args:
        scheme: what to correct; any scheme, though only a biased one needs it.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(PowerSGD(rank=4)))

    Reference: Karimireddy et al., Error Feedback Fixes SignSGD, 2019.
    """

    scheme: Scheme

    biased = False
    stateful = True

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        memory, layout = ctx.memory, ctx.layout
        dtype = torch.promote_types(grad.dtype, torch.float32)
        residual = memory.read(RESIDUAL, layout, device=grad.device, dtype=dtype)
        corrected = memory.scratch(RESIDUAL, layout, like=residual)
        if self.scheme.adds_residual:
            inner = ctx.replace(keep_unsent=True, residual=residual, unsent=corrected)
            result = yield from self.scheme.exchange(grad, inner)
            memory.write(RESIDUAL, layout, result.unsent)
            return result
        torch.add(grad, residual, out=corrected)
        result = yield from self.scheme.exchange(corrected, ctx.replace(keep_unsent=True))
        unsent = result.unsent
        if result.mean.data_ptr() == corrected.data_ptr():  # the buffer becomes the residual
            result = result._replace(mean=corrected.clone())
        if unsent is None:
            unsent = corrected.zero_() if result.sent is None else corrected.sub_(result.sent)
        memory.write(RESIDUAL, layout, unsent)
        return result

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        dtype = torch.promote_types(ctx.output.dtype, torch.float32)
        residual = torch.zeros(shape, dtype=dtype)
        return {**self.scheme.initial_memory(name, shape, ctx), RESIDUAL: residual}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key == RESIDUAL:
            return _residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


def _residual_error(value: Tensor, parameter: torch.Size) -> str | None:
    if not value.is_floating_point():
        return f"is of {value.dtype}, a residual is floating point"
    if value.shape != parameter:
        return f"has shape {tuple(value.shape)}, the parameter has {tuple(parameter)}"
    return None


@dataclass(frozen=True)
class FlushResidual(Wrapper):
    """Adds the residual that an earlier scheme left to the next gradient, once, and forgets it.

    ``HookState.switch`` puts it around a scheme that keeps no residual of its own.
    """

    scheme: Scheme

    stateful = True

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        memory, layout = ctx.memory, ctx.layout
        if memory.has(RESIDUAL) and any(
            memory.get(RESIDUAL, name) is not None for name in layout.names
        ):
            dtype = torch.promote_types(grad.dtype, torch.float32)
            residual = memory.read(RESIDUAL, layout, device=grad.device, dtype=dtype)
            grad.add_(residual.to(grad.dtype))
            memory.write(RESIDUAL, layout, None)
        return (yield from self.scheme.exchange(grad, ctx))

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key == RESIDUAL:
            return _residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


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
class Coalesced(Wrapper):
    """Exchanges all buckets of a step at once, when the last one is ready.

    Fewer and larger collectives, no overlap with the backward pass: for slow links with a long
    round trip, and for schemes whose payloads are tiny.
    """

    scheme: Scheme

    coalesce = True

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        return (yield from self.scheme.exchange(grad, ctx))


def keeps_residual(scheme: Scheme) -> bool:
    """Whether the scheme has error feedback somewhere inside."""
    return any(isinstance(inside, ErrorFeedback) for inside in walk(scheme))


def flushing(scheme: Scheme) -> Scheme:
    """``scheme``, or around it what adds a residual that it would leave where it is."""
    return FlushResidual(scheme) if scheme.averages and not keeps_residual(scheme) else scheme


def any_error(
    schemes: Sequence[Scheme], key: str, value: Tensor, parameter: torch.Size
) -> str | None:
    """None if the value fits one of the schemes, else what the first one that knows it says."""
    errors = [scheme.memory_error(key, value, parameter) for scheme in schemes]
    known = [error for error in errors if error != "unknown"]
    return None if None in known else (known[0] if known else "unknown")
