"""Error feedback, in its forms: what a step did not send is not lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from commhooks._bucket import Bucket, Result, SchemeExchange
from commhooks._memory import Layout
from commhooks._scheme import Scheme, walk
from commhooks._wrapper import Wrapper
from commhooks.kernels import dequantize, payload_bytes, quantize

__all__ = [
    "EF21",
    "RESIDUAL",
    "AveragedFeedback",
    "ErrorFeedback",
    "FlushResidual",
    "Scaled",
    "flushing",
    "keeps_residual",
    "residual_error",
    "take_residual",
    "without_feedback",
    "without_flush",
]

RESIDUAL = "residual"
_OWN, _TOTAL, _VELOCITY = "ef21.own", "ef21.total", "ef21.velocity"
_AVERAGED = "averaged_error"
_BLOCK = 256  # entries per scale of the averaged error


def need_average(owner: Wrapper, scheme: Scheme) -> None:
    """Raises unless what arrives is meant to be the average of what was given, and no more.

    Feedback inside sends what it has held back of earlier steps, too; what is around it would take
    that for an error, and hold it back in turn: both grow without end.
    """
    if scheme.optimizes:
        raise ValueError(
            f"{type(owner).__name__}({type(scheme).__name__}(...)): it gives the optimizer "
            f"something else than an average of gradients, so there is no error to keep; use it "
            f"as it is"
        )
    for inside in walk(scheme):
        if isinstance(inside, (ErrorFeedback, AveragedFeedback, EF21)):
            raise ValueError(
                f"{type(owner).__name__}({type(scheme).__name__}(...)): {type(inside).__name__} "
                f"inside keeps what was not sent already, and two of them diverge; give it the "
                f"scheme without: make(..., error_feedback=False)"
                + (", or memory=False for sdp4bit" if isinstance(inside, AveragedFeedback) else "")
            )


def need_contraction(owner: Wrapper, scheme: Scheme, most: float = 1.0) -> None:
    """Raises where an unbiased scheme's noise makes what is kept grow without end."""
    variance = scheme.variance
    if variance > most:
        name = type(owner).__name__
        raise ValueError(
            f"{name}({type(scheme).__name__}(...)): it is unbiased with a variance of up to "
            f"{variance:.3g} |x|^2, so what {name} keeps can grow without end; use "
            f"{name}(Scaled(...)), or no feedback"
        )


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
    per_rank: ClassVar[Mapping[str, str]] = {RESIDUAL: "sum"}
    own_keys: ClassVar[tuple[str, ...]] = (RESIDUAL,)

    def __post_init__(self) -> None:
        need_average(self, self.scheme)
        super().__post_init__()
        need_contraction(self, self.scheme)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        memory, layout = bucket.memory, bucket.layout
        residual = bucket.read(RESIDUAL)
        unsent = memory.scratch(RESIDUAL, layout, like=residual)
        inside = bucket.replace(residual=residual, unsent=unsent)
        result = inside.completed((yield from self.scheme.exchange(inside)))
        memory.write(RESIDUAL, layout, result.unsent)
        return result

    def initial_memory(self, name: str, shape: torch.Size, bucket: Bucket) -> dict[str, Tensor]:
        dtype = bucket.wide_dtype
        residual = torch.zeros(shape, dtype=dtype)
        return {**self.scheme.initial_memory(name, shape, bucket), RESIDUAL: residual}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key == RESIDUAL:
            return residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


def residual_error(value: Tensor, parameter: torch.Size) -> str | None:
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

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        factor = 1.0 / (1.0 + self.scheme.variance)
        if bucket.unsent is None:
            result = yield from self.scheme.exchange(bucket)
            return result._replace(mean=result.mean.mul_(factor))
        # The gradient is needed after the exchange: the mean must not lie in it.
        inside = bucket.replace(output=torch.empty_like(bucket.output))
        result = inside.completed((yield from self.scheme.exchange(inside)))
        assert result.unsent is not None
        unsent = result.unsent.mul_(factor).add_(bucket.raw, alpha=1.0 - factor)
        if bucket.residual is not None:
            unsent.add_(bucket.residual, alpha=1.0 - factor)
        return Result(result.mean.mul_(factor), unsent=unsent, finite=result.finite)


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
    per_rank: ClassVar[Mapping[str, str]] = {_OWN: "mean", _VELOCITY: "mean"}
    own_keys: ClassVar[tuple[str, ...]] = (_OWN, _TOTAL, _VELOCITY)

    def __post_init__(self) -> None:
        need_average(self, self.scheme)
        super().__post_init__()
        need_contraction(self, self.scheme)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"EF21(momentum=...): 0 <= momentum < 1, got {self.momentum!r}")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        memory, layout = bucket.memory, bucket.layout
        target = bucket.gradient.to(bucket.wide_dtype)
        if self.momentum:
            target = torch.lerp(target, bucket.read(_VELOCITY), self.momentum)
            memory.write(_VELOCITY, layout, target)
        own = bucket.read(_OWN)
        difference = target - own
        inside = bucket.replace(
            raw=difference.clone(),
            residual=None,
            unsent=torch.empty_like(difference),
            output=torch.empty_like(difference),
        )
        result = inside.completed((yield from self.scheme.exchange(inside)))
        assert result.unsent is not None
        sent = difference - result.unsent if result.sent is None else result.sent
        memory.write(_OWN, layout, own + sent)
        total = bucket.read(_TOTAL) + result.mean
        memory.write(_TOTAL, layout, total)
        return Result(bucket.output.copy_(total), finite=result.finite)

    def _keys(self) -> tuple[str, ...]:
        return (_OWN, _TOTAL, *((_VELOCITY,) if self.momentum else ()))

    def initial_memory(self, name: str, shape: torch.Size, bucket: Bucket) -> dict[str, Tensor]:
        dtype = bucket.wide_dtype
        zeros = {key: torch.zeros(shape, dtype=dtype) for key in self._keys()}
        return {**self.scheme.initial_memory(name, shape, bucket), **zeros}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key in self._keys():
            return residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


@dataclass(frozen=True)
class FlushResidual(Wrapper):
    """Adds the residual that an earlier scheme left to the next gradient, once, and forgets it.

    ``HookState.switch`` puts it around a scheme that keeps no residual of its own.
    """

    scheme: Scheme

    stateful = True
    per_rank: ClassVar[Mapping[str, str]] = {RESIDUAL: "sum"}
    own_keys: ClassVar[tuple[str, ...]] = (RESIDUAL,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        memory, layout = bucket.memory, bucket.layout
        if memory.has(RESIDUAL) and any(
            memory.get(RESIDUAL, name) is not None for name in layout.names
        ):
            bucket.raw.add_(bucket.read(RESIDUAL).to(bucket.raw.dtype))
            memory.write(RESIDUAL, layout, None)
        return (yield from self.scheme.exchange(bucket))

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key == RESIDUAL:
            return residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)


def without_flush(scheme: Scheme) -> Scheme:
    """The scheme that runs once a residual that it does not keep has been flushed."""
    return scheme.scheme if isinstance(scheme, FlushResidual) else scheme


@dataclass(frozen=True)
class AveragedFeedback(Wrapper):
    """Adds to each gradient a moving average of what earlier steps lost, kept in 8 bits an entry.

    ``c = g + e; e = decay e + (1 - decay) (c - sent(c))``: a quarter of the memory of
    :class:`ErrorFeedback`. Unlike there, what is applied and what is kept do not sum to the
    gradients; with ``decay=0`` they do, up to the rounding of the memory (1/254 of the largest
    entry of 256).

    Args:
        scheme: what to correct.
        decay: weight of the old average, 0 <= decay < 1.
        reset_every: forgets the average every so many steps; 0: never.

    Example:
        >>> hook = register(ddp_model, AveragedFeedback(Blockwise("int4", 128)))

    Reference: Xie et al., LoCo: Low-Bit Communication Adaptor, 2024.
    """

    scheme: Scheme
    decay: float = 0.8
    reset_every: int = 1024

    biased = False
    stateful = True
    variance = 0.0
    linear = False
    per_rank: ClassVar[Mapping[str, str]] = {_AVERAGED: "drop"}
    own_keys: ClassVar[tuple[str, ...]] = (_AVERAGED,)

    def __post_init__(self) -> None:
        need_average(self, self.scheme)
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise ValueError(f"AveragedFeedback(decay=...): 0 <= decay < 1, got {self.decay!r}")
        # |e|^2 becomes decay^2 |e|^2 + (1 - decay)^2 variance |g + e|^2 on average.
        need_contraction(self, self.scheme, most=(1 + self.decay) / (1 - self.decay))
        if self.reset_every < 0:
            raise ValueError(
                f"AveragedFeedback(reset_every=...) is a number of steps, or 0, "
                f"got {self.reset_every!r}"
            )

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        layout, packed = bucket.layout, _packed_layout(bucket.layout)
        error = torch.zeros_like(bucket.raw, dtype=torch.float32)
        old = bucket.read(_AVERAGED, packed, torch.uint8)
        for entries, payload in _pairs(error, old, layout, packed):
            dequantize(payload[None], entries, "int8", _BLOCK)
        residual = error.to(bucket.wide_dtype)
        inside = bucket.replace(
            raw=bucket.gradient, residual=residual, unsent=torch.empty_like(residual)
        )
        result = inside.completed((yield from self.scheme.exchange(inside)))
        assert result.unsent is not None
        unsent = None if bucket.unsent is None else result.unsent - residual
        error.mul_(self.decay).add_(result.unsent, alpha=1 - self.decay)
        if self.reset_every and (bucket.step + 1) % self.reset_every == 0:
            error.zero_()
        new = torch.empty_like(old)
        for entries, payload in _pairs(error, new, layout, packed):
            quantize(entries, payload, "int8", _BLOCK)
        bucket.memory.write(_AVERAGED, packed, new)
        return Result(result.mean, unsent=unsent, finite=result.finite)

    def initial_memory(self, name: str, shape: torch.Size, bucket: Bucket) -> dict[str, Tensor]:
        empty = torch.zeros(payload_bytes(shape.numel(), "int8", _BLOCK), dtype=torch.uint8)
        return {**self.scheme.initial_memory(name, shape, bucket), _AVERAGED: empty}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key != _AVERAGED:
            return self.scheme.memory_error(key, value, parameter)
        nbytes = payload_bytes(parameter.numel(), "int8", _BLOCK)
        if value.dtype != torch.uint8 or value.shape != (nbytes,):
            return f"is {value.dtype} of shape {tuple(value.shape)}, not {nbytes} bytes"
        entries = torch.zeros(parameter.numel(), device=value.device)
        if entries.numel():
            dequantize(value.contiguous()[None], entries, "int8", _BLOCK)
        return None if bool(torch.isfinite(entries).all()) else "is not finite"


@lru_cache(maxsize=1024)
def _packed_layout(layout: Layout) -> Layout:
    """Of the bytes that each parameter's memory takes."""
    return Layout(layout.names, [(payload_bytes(n, "int8", _BLOCK),) for n in layout.sizes])


def _pairs(
    entries: Tensor, payload: Tensor, layout: Layout, packed: Layout
) -> Iterator[tuple[Tensor, Tensor]]:
    """The entries and the bytes of each parameter that has some."""
    for part, own in zip(entries.split(layout.sizes), payload.split(packed.sizes), strict=True):
        if part.numel():
            yield part, own


def keeps_residual(scheme: Scheme) -> bool:
    """Whether the scheme has error feedback somewhere inside."""
    return any(isinstance(inside, ErrorFeedback) for inside in walk(scheme))


def without_feedback(scheme: Scheme) -> Scheme:
    """The scheme inside error feedback; itself where there is none around it."""
    while isinstance(scheme, (AveragedFeedback, ErrorFeedback, Scaled)):
        scheme = scheme.scheme
    return scheme


def flushing(scheme: Scheme) -> Scheme:
    """``scheme``, or around it what adds a residual that it would leave where it is."""
    try:
        return _flushing(scheme)
    except TypeError:  # a setting that has no hash, such as a list
        return _flushing.__wrapped__(scheme)


@lru_cache(maxsize=1024)  # asked for in every step
def _flushing(scheme: Scheme) -> Scheme:
    return FlushResidual(scheme) if scheme.averages and not keeps_residual(scheme) else scheme


def take_residual(bucket: Bucket) -> None:
    """Adds what error feedback has held back to the gradient, and leaves nothing behind."""
    residual = bucket.read(RESIDUAL)
    bucket.raw.add_(residual.to(bucket.raw.dtype))
    empty = bucket.memory.scratch(RESIDUAL, bucket.layout, like=residual)
    bucket.memory.write(RESIDUAL, bucket.layout, empty.zero_())
