"""Defines error feedback, which adds the residual of a step to the next gradient.

A wrapper hands the residual to the scheme inside; ``Bucket.gradient``, or a kernel, adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._layout import Span
from commhooks.core._scheme import Scheme, checked_result, walk
from commhooks.core._slot import Slot, StepInfo
from commhooks.core._traits import Biased, Exact, Traits
from commhooks.wrappers._base import Wrapper

__all__ = [
    "RESIDUAL",
    "RESIDUAL_SLOT",
    "ErrorFeedback",
    "Feedback",
    "FlushResidual",
    "Scaled",
    "has_feedback",
    "keeps_residual",
    "pop_residual",
    "unwrap_flush",
    "with_flush",
    "without_feedback",
]

RESIDUAL = "residual"
RESIDUAL_SLOT = Slot(RESIDUAL, resize="sum")


def check_averages(owner: Wrapper, scheme: Scheme) -> None:
    """Raises unless a scheme returns the average of gradients and keeps no residual itself.

    Feedback inside adds its residual to what it sends; feedback around it would take that for an
    error and keep it, too: both residuals grow without bound.
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


def check_contraction(owner: Wrapper, scheme: Scheme, most: float) -> None:
    """Raises if the variance of an unbiased scheme makes the residual grow without bound.

    A residual e of noise of relative variance w is w |g + e|^2 on average: it converges for w < 1.
    """
    variance = scheme.traits.error.variance
    if variance > most:
        name = type(owner).__name__
        raise ValueError(
            f"{name}({type(scheme).__name__}(...)): it is unbiased with a variance of up to "
            f"{variance:.3g} |x|^2, so what {name} keeps can grow without end; use "
            f"{name}(Scaled(...)), or no feedback"
        )


class Feedback(Wrapper):
    """Keeps what a step did not send for later steps; a base class.

    Attributes:
        corrects: the scheme inside gets the gradient plus what was kept; False: something else,
            such as differences.
        without: the end of an error message: how to leave this wrapper out, besides
            ``error_feedback=False``.
    """

    corrects: ClassVar[bool] = True
    without: ClassVar[str] = ""

    @property
    def traits(self) -> Traits:
        # Exact over steps: what one step does not send, later ones do.
        return self.scheme.traits._replace(error=Exact())

    def __post_init__(self) -> None:
        check_averages(self, self.scheme)
        super().__post_init__()
        check_contraction(self, self.scheme, self.most_variance)

    @property
    def most_variance(self) -> float:
        """Returns the largest variance of an unbiased scheme for which the residual is bounded."""
        return 1.0


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Adds what earlier steps did not send to each gradient: ``c = g + e; e = c - sent(c)``.

    The residual ``e`` is kept per rank and parameter in float32 (float64 for float64 gradients).
    A step in which any gradient of any rank is not finite does not change it, so that a step
    writes to a second buffer of the same size. On the CPU that buffer is kept for the next step.

    Args:
        scheme: the scheme to correct. Only a biased one needs feedback.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(PowerSGD(rank=4)))

    Reference: Karimireddy et al., Error Feedback Fixes SignSGD, 2019.
    """

    scheme: Scheme

    keeps = (RESIDUAL_SLOT,)

    @property
    def gathers(self) -> bool:
        return self.scheme.gathers

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        inside = _with_residual(bucket)
        result = checked_result(self.scheme, (yield from self.scheme.exchange(inside)))
        return _store_residual(bucket, inside, result)

    def all_gather(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        inside = _with_residual(bucket)
        return _store_residual(bucket, inside, (yield from self.scheme.all_gather(inside, parts)))


def _with_residual(bucket: Bucket) -> Bucket:
    """Returns a bucket with the residual of earlier steps, and memory for this step's."""
    residual = bucket.read(RESIDUAL_SLOT)
    # Not in place: if the step turns out not to be finite, the old residual stays.
    unsent = bucket.scratch(RESIDUAL_SLOT, like=residual)
    return bucket.replace(residual=residual, unsent=unsent)


def _store_residual(bucket: Bucket, inside: Bucket, result: Result) -> Result:
    """Stores what a step did not send as the next residual, and completes the result."""
    result = inside.with_unsent(result)
    assert result.unsent is not None
    bucket.write(RESIDUAL_SLOT, result.unsent)  # which is not ``bucket``'s own: no copy
    return result


@dataclass(frozen=True)
class Scaled(Wrapper):
    """Divides the mean of an unbiased scheme of variance w by 1 + w, which makes it a contraction.

    Error feedback around the scheme alone diverges if w is above 1; around this it converges.

    Args:
        scheme: an unbiased scheme, whose traits declare its variance.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(Scaled(Eden(bits=1))))

    Reference: Richtarik, Sokolov and Fatkhullin, EF21, 2021 (section 2).
    """

    scheme: Scheme

    @property
    def traits(self) -> Traits:
        return self.scheme.traits._replace(error=Biased())  # the mean is too small by 1 + w

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        factor = 1.0 / (1.0 + self.scheme.traits.error.variance)
        if bucket.unsent is None:
            result = checked_result(self.scheme, (yield from self.scheme.exchange(bucket)))
            return result._replace(mean=result.mean.mul_(factor))
        # The gradient is read after the exchange, so the mean may not overwrite it.
        inside = bucket.replace(output=torch.empty_like(bucket.output))
        result = checked_result(self.scheme, (yield from self.scheme.exchange(inside)))
        result = inside.with_unsent(result)
        assert result.unsent is not None
        # c - factor sent(c) = factor (c - sent(c)) + (1 - factor) c
        unsent = result.unsent.mul_(factor).add_(bucket.raw, alpha=1.0 - factor)
        if bucket.residual is not None:
            unsent.add_(bucket.residual, alpha=1.0 - factor)
        return Result(result.mean.mul_(factor), unsent=unsent, finite=result.finite)


@dataclass(frozen=True)
class _PendingResidual(Slot):
    """Declares the residual that an earlier scheme left; there is no initial value."""

    key: str = RESIDUAL
    resize: Literal["same", "sum", "mean", "drop"] = "sum"

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> None:
        return None


@dataclass(frozen=True)
class FlushResidual(Wrapper):
    """Adds the residual that an earlier scheme left to the next gradient, and removes it.

    ``HookState.switch`` puts this wrapper around a scheme that keeps no residual.
    """

    scheme: Scheme

    keeps = (_PendingResidual(),)

    @property
    def gathers(self) -> bool:
        return self.scheme.gathers

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if _is_pending(bucket):
            bucket.raw.add_(_pop_residual(bucket))
        return (yield from self.scheme.exchange(bucket))

    def all_gather(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        if _is_pending(bucket):  # not in place: the input is not given back
            bucket = bucket.replace(raw=bucket.raw + _pop_residual(bucket))
        return (yield from self.scheme.all_gather(bucket, parts))


def _is_pending(bucket: Bucket) -> bool:
    memory = bucket.memory
    return memory.has(RESIDUAL) and any(
        memory.get(RESIDUAL, name) is not None for name in bucket.layout.names
    )


def _pop_residual(bucket: Bucket) -> Tensor:
    """Returns the residual of a bucket in the dtype of its gradient, and removes it."""
    residual = bucket.read(RESIDUAL_SLOT).to(bucket.raw.dtype)
    # Staged like all writes: if this step is not finite, the residual waits for the next.
    bucket.memory.write(RESIDUAL, bucket.layout, None)
    return residual


def unwrap_flush(scheme: Scheme) -> Scheme:
    """Returns the scheme inside a ``FlushResidual``, or ``scheme`` itself."""
    return scheme.scheme if isinstance(scheme, FlushResidual) else scheme


def keeps_residual(scheme: Scheme) -> bool:
    """Whether the scheme is, or contains, an ``ErrorFeedback``, which keeps a residual."""
    return any(isinstance(inside, ErrorFeedback) for inside in walk(scheme))


def has_feedback(scheme: Scheme) -> bool:
    """Whether the scheme is, or contains, feedback, which has to know exactly what was sent."""
    return any(isinstance(inside, Feedback) for inside in walk(scheme))


def without_feedback(scheme: Scheme) -> Scheme:
    """Returns the scheme inside error feedback, or ``scheme`` itself if there is none."""
    while isinstance(scheme, Scaled) or (isinstance(scheme, Feedback) and scheme.corrects):
        scheme = scheme.scheme
    return scheme


def with_flush(scheme: Scheme) -> Scheme:
    """Returns a scheme that consumes a residual: ``scheme``, or ``FlushResidual`` around it."""
    try:
        return _with_flush(scheme)
    except TypeError:  # a setting that has no hash, such as a list
        return _with_flush.__wrapped__(scheme)


@lru_cache(maxsize=1024)  # called in every step; making a wrapper checks all schemes inside
def _with_flush(scheme: Scheme) -> Scheme:
    return (
        FlushResidual(scheme) if scheme.traits.averages and not keeps_residual(scheme) else scheme
    )


def pop_residual(bucket: Bucket) -> None:
    """Adds the residual of error feedback to the gradient, and sets it to zero."""
    residual = bucket.read(RESIDUAL_SLOT)
    bucket.raw.add_(residual.to(bucket.raw.dtype))
    bucket.write(RESIDUAL_SLOT, bucket.scratch(RESIDUAL_SLOT, like=residual).zero_())
