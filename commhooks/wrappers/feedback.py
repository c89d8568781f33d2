"""Error feedback: what a step did not send is not lost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch

from commhooks.core.bucket import Bucket, Result, SchemeExchange
from commhooks.core.scheme import Scheme, walk
from commhooks.core.slot import Slot
from commhooks.core.step_info import StepInfo
from commhooks.core.traits import Biased, Exact, Traits
from commhooks.wrappers.base import Wrapper

__all__ = [
    "RESIDUAL",
    "RESIDUAL_SLOT",
    "ErrorFeedback",
    "Feedback",
    "FlushResidual",
    "Scaled",
    "flushing",
    "has_feedback",
    "keeps_residual",
    "take_residual",
    "without_feedback",
    "without_flush",
]

RESIDUAL = "residual"
RESIDUAL_SLOT = Slot(RESIDUAL, resize="sum")


def need_average(owner: Wrapper, scheme: Scheme) -> None:
    """Raises unless what arrives is meant to be the average of what was given, and no more.

    Feedback inside sends what it has held back of earlier steps, too; what is around it would take
    that for an error, and hold it back in turn: both grow without end.
    """
    if scheme.traits.returns == "update":
        raise ValueError(
            f"{type(owner).__name__}({type(scheme).__name__}(...)): it gives the optimizer "
            f"something else than an average of gradients, so there is no error to keep; use it "
            f"as it is"
        )
    for inside in walk(scheme):
        if isinstance(inside, Feedback):
            raise ValueError(
                f"{type(owner).__name__}({type(scheme).__name__}(...)): {type(inside).__name__} "
                f"inside keeps what was not sent already, and two of them diverge; give it the "
                f"scheme without: make(..., error_feedback=False)"
                f"{inside.without}"
            )


def need_contraction(owner: Wrapper, scheme: Scheme, most: float) -> None:
    """Raises where an unbiased scheme's noise makes what is kept grow without end."""
    variance = scheme.traits.error.variance
    if variance > most:
        name = type(owner).__name__
        raise ValueError(
            f"{name}({type(scheme).__name__}(...)): it is unbiased with a variance of up to "
            f"{variance:.3g} |x|^2, so what {name} keeps can grow without end; use "
            f"{name}(Scaled(...)), or no feedback"
        )


class Feedback(Wrapper):
    """Base of what keeps the part of a gradient that a step did not send, for later ones.

    Attributes:
        corrects: the scheme inside is given the gradient with what was kept; False: something
            else, such as differences.
        without: how to do without this one, besides ``error_feedback=False``.
    """

    corrects: ClassVar[bool] = True
    without: ClassVar[str] = ""

    @property
    def traits(self) -> Traits:
        return self.scheme.traits._replace(error=Exact())

    def __post_init__(self) -> None:
        need_average(self, self.scheme)
        super().__post_init__()
        need_contraction(self, self.scheme, self.most_variance)

    @property
    def most_variance(self) -> float:
        """The largest variance of an unbiased scheme with which what is kept stays bounded."""
        return 1.0


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
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

    keeps = (RESIDUAL_SLOT,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        residual = bucket.read(RESIDUAL_SLOT)
        unsent = bucket.scratch(RESIDUAL_SLOT, like=residual)
        inside = bucket.replace(residual=residual, unsent=unsent)
        result = inside.completed((yield from self.scheme.exchange(inside)))
        assert result.unsent is not None
        bucket.write(RESIDUAL_SLOT, result.unsent)
        return result


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

    @property
    def traits(self) -> Traits:
        return self.scheme.traits._replace(error=Biased())

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        factor = 1.0 / (1.0 + self.scheme.traits.error.variance)
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
class _PendingResidual(Slot):
    """The residual of an earlier scheme: there is none unless that scheme left one."""

    key: str = RESIDUAL
    resize: Literal["same", "sum", "mean", "drop"] = "sum"

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> None:
        return None


@dataclass(frozen=True)
class FlushResidual(Wrapper):
    """Adds the residual that an earlier scheme left to the next gradient, once, and forgets it.

    ``HookState.switch`` puts it around a scheme that keeps no residual of its own.
    """

    scheme: Scheme

    keeps = (_PendingResidual(),)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        memory, layout = bucket.memory, bucket.layout
        if memory.has(RESIDUAL) and any(
            memory.get(RESIDUAL, name) is not None for name in layout.names
        ):
            bucket.raw.add_(bucket.read(RESIDUAL_SLOT).to(bucket.raw.dtype))
            memory.write(RESIDUAL, layout, None)
        return (yield from self.scheme.exchange(bucket))


def without_flush(scheme: Scheme) -> Scheme:
    """The scheme that runs once a residual that it does not keep has been flushed."""
    return scheme.scheme if isinstance(scheme, FlushResidual) else scheme


def keeps_residual(scheme: Scheme) -> bool:
    """Whether the scheme has error feedback somewhere inside."""
    return any(isinstance(inside, ErrorFeedback) for inside in walk(scheme))


def has_feedback(scheme: Scheme) -> bool:
    """Whether anything inside has to know exactly what was sent."""
    return any(isinstance(inside, Feedback) for inside in walk(scheme))


def without_feedback(scheme: Scheme) -> Scheme:
    """The scheme inside error feedback; itself where there is none around it."""
    while isinstance(scheme, Scaled) or (isinstance(scheme, Feedback) and scheme.corrects):
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
    return (
        FlushResidual(scheme) if scheme.traits.averages and not keeps_residual(scheme) else scheme
    )


def take_residual(bucket: Bucket) -> None:
    """Adds what error feedback has held back to the gradient, and leaves nothing behind."""
    residual = bucket.read(RESIDUAL_SLOT)
    bucket.raw.add_(residual.to(bucket.raw.dtype))
    bucket.write(RESIDUAL_SLOT, bucket.scratch(RESIDUAL_SLOT, like=residual).zero_())
