"""Defines ``AveragedFeedback``, error feedback that keeps a moving average in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._scheme import Scheme, checked_result
from commhooks.core._slot import Slot
from commhooks.kernels import dequantize_parts, part_bytes, quantize_parts
from commhooks.wrappers._feedback import Feedback

__all__ = ["AveragedFeedback"]


@dataclass(frozen=True)
class _Averaged(Slot):
    """Declares the averaged error of a parameter, kept as a payload of 8-bit integers."""

    def shape(self, parameter: torch.Size) -> tuple[int, ...]:
        return (part_bytes(parameter.numel()),)

    def check(self, value: Tensor, parameter: torch.Size) -> str | None:
        (nbytes,) = self.shape(parameter)
        if value.dtype != torch.uint8 or value.shape != (nbytes,):
            return f"is {value.dtype} of shape {tuple(value.shape)}, not {nbytes} bytes"
        # Bytes of a damaged file may be scales that are infinite or NaN, which would never decay.
        entries = torch.zeros(parameter.numel(), dtype=torch.float32, device=value.device)
        dequantize_parts(value.contiguous(), entries, (parameter.numel(),))
        return None if bool(torch.isfinite(entries).all()) else "is not finite"


_AVERAGED = _Averaged("averaged_error", resize="drop", dtype=torch.uint8)


@dataclass(frozen=True)
class AveragedFeedback(Feedback):
    """Adds to each gradient a moving average of earlier errors, kept in 8 bits per entry.

    ``c = g + e; e = decay e + (1 - decay) (c - sent(c))``: a quarter of the memory of
    :class:`ErrorFeedback`. Unlike the residual there, the average does not hold all that was not
    sent; with ``decay=0`` it does, up to the rounding of the memory (1/254 of the largest of 256
    entries).

    Args:
        scheme: the scheme to correct.
        decay: weight of the old average, 0 <= decay < 1.
        reset_every: number of steps after which the average is set to zero; 0: never.

    Example:
        >>> hook = register(ddp_model, AveragedFeedback(Blockwise("int4", 128)))

    Reference: Xie et al., LoCo: Low-Bit Communication Adaptor, 2024.
    """

    scheme: Scheme
    decay: float = 0.8
    reset_every: int = 1024

    without = ", or memory=False for sdp4bit"
    keeps = (_AVERAGED,)

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"AveragedFeedback(decay=...): 0 <= decay < 1, got {self.decay!r}")
        if self.reset_every < 0:
            raise ValueError(
                f"AveragedFeedback(reset_every=...) is a number of steps, or 0, "
                f"got {self.reset_every!r}"
            )
        super().__post_init__()

    @property
    def most_variance(self) -> float:
        # On average |e|^2 becomes decay^2 |e|^2 + (1 - decay)^2 variance |g + e|^2, which stays
        # bounded where (1 - decay)^2 variance < 1 - decay^2.
        return (1 + self.decay) / (1 - self.decay)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        # Packed parameter by parameter, not as a bucket: buckets change, and memory goes by name.
        error = torch.empty_like(bucket.raw, dtype=torch.float32)
        old, sizes = bucket.read(_AVERAGED), bucket.layout.sizes
        dequantize_parts(old, error, sizes)
        residual = error.to(bucket.wide_dtype)
        inside = bucket.replace(
            raw=bucket.gradient, residual=residual, unsent=torch.empty_like(residual)
        )
        result = checked_result(self.scheme, (yield from self.scheme.exchange(inside)))
        result = inside.with_unsent(result)
        assert result.unsent is not None
        # A wrapper around this one gets the error with respect to g, not to g + e.
        unsent = None if bucket.unsent is None else result.unsent - residual
        torch.lerp(result.unsent.to(error.dtype), error, self.decay, out=error)
        if self.reset_every and (bucket.step + 1) % self.reset_every == 0:
            error.zero_()
        # Not in place: a step that is not finite goes back to ``old``.
        new = bucket.scratch(_AVERAGED, like=old)
        quantize_parts(error, new, sizes)
        bucket.write(_AVERAGED, new)
        return Result(result.mean, unsent=unsent, finite=result.finite)
