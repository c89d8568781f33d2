"""Schemes around a scheme: error feedback, delayed start, coalescing."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange, walk
from commhooks.schemes.dense import Dense

__all__ = [
    "EF21",
    "RESIDUAL",
    "Coalesced",
    "DelayedStart",
    "ErrorFeedback",
    "FlushResidual",
    "PeriodicDense",
    "Scaled",
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
    def variance(self) -> float:  # type: ignore[override]
        return self.scheme.variance

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
    variance = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        variance = self.scheme.variance
        if variance > 1:
            raise ValueError(
                f"ErrorFeedback({type(self.scheme).__name__}(...)): it is unbiased with a variance "
                f"of up to {variance:.3g} |x|^2, so a residual can grow without end; use "
                f"ErrorFeedback(Scaled(...)), or no feedback"
            )

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
class Scaled(Wrapper):
    """Shrinks what an unbiased scheme of large variance w gives by 1 + w: a contraction.

    Error feedback on the scheme itself diverges if w is above 1; on this it converges.

    Args:
        scheme: unbiased, with a ``variance``.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(Scaled(TernGrad())))

    Reference: Richtarik, Sokolov and Fatkhullin, EF21, 2021 (section 2).
    """

    scheme: Scheme

    biased = True
    variance = 0.0

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        factor = 1.0 / (1.0 + self.scheme.variance)
        result = yield from self.scheme.exchange(grad, ctx)
        mean, sent, unsent = result.mean, result.sent, result.unsent
        if sent is not None:
            sent = sent * factor
        elif unsent is not None:  # g - factor (g - unsent)
            unsent = unsent.mul_(factor).add_(grad, alpha=1.0 - factor)
        elif ctx.keep_unsent:
            sent = grad * factor
        return result._replace(mean=mean.mul_(factor), sent=sent, unsent=unsent)


@dataclass(frozen=True)
class EF21(Wrapper):
    """Sends how far each gradient is from what was sent of it before; ranks sum up what they get.

    ``G_i += C(g_i - G_i)``, and the mean over ranks of all G_i is what the optimizer gets. Needs a
    contraction (a biased scheme). Unlike a residual, G does not grow where gradients do. Keeps two
    tensors of the gradient's size; the mean lags behind the gradient by some steps.

    Args:
        scheme: what to send differences by.
        momentum: above 0, differences are of ``v_i = momentum v_i + (1 - momentum) g_i``, which
            stochastic gradients need; keeps a third tensor.

    Example:
        >>> hook = register(ddp_model, EF21(TopK(0.01), momentum=0.9))

    References: Richtarik, Sokolov and Fatkhullin, EF21, 2021; Fatkhullin, Tyurin and Richtarik,
    Momentum Provably Improves Error Feedback, 2023.
    """

    scheme: Scheme
    momentum: float = 0.0

    biased = False
    stateful = True
    variance = 0.0
    linear = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"EF21(momentum=...): 0 <= momentum < 1, got {self.momentum!r}")

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        memory, layout = ctx.memory, ctx.layout
        dtype = torch.promote_types(grad.dtype, torch.float32)

        def read(key: str) -> Tensor:
            return memory.read(key, layout, device=grad.device, dtype=dtype)

        target = grad.to(dtype)
        if self.momentum:
            target = torch.lerp(target, read(_VELOCITY), self.momentum)
            memory.write(_VELOCITY, layout, target)
        own = read(_OWN)
        difference = target - own
        output = torch.empty_like(difference)
        inner = ctx.replace(keep_unsent=True, output=output, residual=None, unsent=None)
        handed = difference.clone()
        result = yield from self.scheme.exchange(handed, inner)
        if result.unsent is not None:
            difference -= result.unsent
        elif result.sent is not None:
            difference = result.sent
        memory.write(_OWN, layout, own + difference)
        total = read(_TOTAL) + result.mean
        memory.write(_TOTAL, layout, total)
        return Exchanged(ctx.output.copy_(total), finite=result.finite)

    def _keys(self) -> tuple[str, ...]:
        return (_OWN, _TOTAL, *((_VELOCITY,) if self.momentum else ()))

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        dtype = torch.promote_types(ctx.output.dtype, torch.float32)
        zeros = {key: torch.zeros(shape, dtype=dtype) for key in self._keys()}
        return {**self.scheme.initial_memory(name, shape, ctx), **zeros}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key in self._keys():
            return _residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


_OWN, _TOTAL, _VELOCITY = "ef21.own", "ef21.total", "ef21.velocity"


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
            memory, layout = ctx.memory, ctx.layout
            dtype = torch.promote_types(grad.dtype, torch.float32)
            residual = memory.read(RESIDUAL, layout, device=grad.device, dtype=dtype)
            grad.add_(residual.to(grad.dtype))
            empty = memory.scratch(RESIDUAL, layout, like=residual)
            memory.write(RESIDUAL, layout, empty.zero_())
        return (yield from Dense().exchange(grad, ctx))


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
