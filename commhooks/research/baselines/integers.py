"""Defines schemes that sum 8-bit integers of a shared scale by one all-reduce of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, SchemeExchange, nan_unless
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Number, StepInfo
from commhooks.core._traits import Biased, Traits, Unbiased
from commhooks.kernels import (
    all_finite,
    dequantize_shared,
    largest_magnitudes,
    quantize_shared,
    squared_norms,
)
from ddp_core import AllReduce

__all__ = ["GlobalQSGD", "IntSGD"]

_TOP = 127
_WHOLE = 2**31  # a block that holds any bucket


@dataclass(frozen=True)
class _Squares(Number):
    """Declares the moving average of a parameter's squared norm, in float64: no underflow."""

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> None:
        return None  # the first step is dense


_NORM = _Squares("intsgd.norm")


@register_scheme("global_qsgd")
@dataclass(frozen=True)
class GlobalQSGD(Scheme):
    """Sums 8-bit integers with one scale per block, on which ranks agree first.

    The largest magnitude of each block over all n ranks is level ``127 // n``, so that the sum of n
    codes does not overflow. One all-reduce of 4 / block bytes per entry, then one of a byte per
    entry. There are fewer levels on more ranks: 63 on 2, 15 on 8, 3 on 32; above 127 ranks, and
    above 63 with error feedback, the bucket is averaged densely. Unbiased. The declared variance is
    that on one rank; its bound for all gradients of n ranks together grows with n^3.

    Args:
        block: entries per scale, a multiple of 256.
        stochastic: rounds up or down at random, unbiased; False: rounds to nearest, which halves
            the error but is biased.

    Example:
        >>> hook = register(ddp_model, "global_qsgd")

    Reference: Xin et al., Global-QSGD: Practical Floatless Quantization, 2023.
    """

    block: int = 256
    stochastic: bool = True

    def __post_init__(self) -> None:
        if self.block < 256 or self.block % 256:
            raise ValueError(f"GlobalQSGD(block=...) is a multiple of 256, got {self.block!r}")

    @property
    def traits(self) -> Traits:
        # On one rank. On n, the bound for all ranks together is n block / (4 levels^2).
        unbiased = Unbiased(self.block / (4.0 * _TOP**2))
        return Traits(rounds=2, error=unbiased if self.stochastic else Biased())

    def error_growth(self, world_size: int) -> float:
        return (_TOP / max(_TOP // world_size, 1)) ** 2

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n, levels, block = bucket.raw.numel(), _TOP // bucket.world_size, self.block
        blocks = -(-n // block)
        # An error of up to a level is kept. With one level that is the largest entry, so a residual
        # would raise the next step's level, and grow; with two levels it stays below the gradient.
        if levels < (1 if bucket.unsent is None else 2) or n + 4 * blocks >= bucket.raw.nbytes:
            return (yield from bucket.all_reduce())
        inside = bucket.in_float32()
        x, residual = inside.raw, inside.residual
        largest = x.new_empty(blocks, dtype=torch.int32)
        largest_magnitudes(x, largest, block, residual=residual)
        # Magnitudes as the bits of float32, which order like the values: a maximum of int32 is
        # exact, and no cast around the scheme rounds it.
        largest = yield AllReduce(largest, "max")
        codes = x.new_empty(n, dtype=torch.int8)
        noise = bucket.random("noise", shared=False) if self.stochastic else None
        parts = {"residual": residual, "unsent": inside.unsent}
        quantize_shared(x, largest, codes, block, levels, **parts, random=noise)
        codes = yield AllReduce(codes, "sum")
        factor = 1.0 / bucket.world_size
        dequantize_shared(codes, largest, inside.output, block, levels, factor=factor)
        return bucket.result_of(inside)


@register_scheme("intsgd")
@dataclass(frozen=True)
class IntSGD(Scheme):
    """Sends 8-bit integers, with a scale that all ranks compute from past steps.

    On n ranks the distance of two levels is ``sqrt(2 n r / d) / precision``, where r is a moving
    average of the squared norm of the averaged gradient and d its number of entries. One all-reduce
    of a byte per entry. Entries above ``127 // n`` levels are clipped, as when gradients suddenly
    grow; unbiased otherwise. Where the ranks' gradients have little in common, that is 2.5 times
    the root mean square of a gradient on 16 ranks and 1.1 times on 32: many entries are clipped in
    every step, and a residual of error feedback can grow without bound. The first step is dense,
    and every step above 127 ranks.

    Args:
        precision: levels per ``sqrt(2 n)`` root mean squares of the averaged gradient.
        decay: weight of the old average, 0 <= decay < 1.
        stochastic: rounds up or down at random, unbiased; False: rounds to nearest, biased.

    Example:
        >>> hook = register(ddp_model, "intsgd")

    Reference: Mishchenko et al., IntSGD: Adaptive Floatless Compression, 2022.
    """

    precision: float = 4.0
    decay: float = 0.9
    stochastic: bool = True

    keeps = (_NORM,)

    def __post_init__(self) -> None:
        if not self.precision > 0:
            raise ValueError(f"IntSGD(precision=...) is above 0, got {self.precision!r}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"IntSGD(decay=...): 0 <= decay < 1, got {self.decay!r}")

    @property
    def traits(self) -> Traits:
        # Each of d entries has a variance of level^2 / 4 at most: n r / (2 precision^2) on a rank,
        # and 1 / n of it in the mean of n ranks.
        unbiased = Unbiased(1 / (2 * self.precision**2))
        return Traits(error=unbiased if self.stochastic else Biased(), max_bucket_numel=_WHOLE)

    def error_growth(self, world_size: int) -> float:
        # Its scale is of past steps: gradients that shrink or grow at once are far off.
        return math.inf

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n, levels = bucket.raw.numel(), _TOP // bucket.world_size
        if not self._known(bucket) or not levels or n + 1 >= bucket.raw.nbytes:
            result = yield from bucket.all_reduce()
            self._remember(result.mean, bucket)
            return result
        inside = bucket.in_float32()
        squares = bucket.read(_NORM).sum()
        # Never zero: after steps of zero gradients, codes could not represent any other gradient.
        level = torch.sqrt(2.0 * bucket.world_size / n * squares).clamp(min=1e-20) / self.precision
        magnitude = (level * levels).float().view(1).view(torch.int32)
        codes = inside.raw.new_empty(n + 1, dtype=torch.int8)
        noise = bucket.random("noise", shared=False) if self.stochastic else None
        parts = {"residual": inside.residual, "unsent": inside.unsent}
        quantize_shared(inside.raw, magnitude, codes[:n], _WHOLE, levels, **parts, random=noise)
        # One more code: how many ranks have a gradient that is not finite, which codes cannot say.
        codes[n] = ~_all_finite(inside)
        codes = yield AllReduce(codes, "sum")
        mean, factor = inside.output, 1.0 / bucket.world_size
        dequantize_shared(codes[:n], magnitude, mean, _WHOLE, levels, factor=factor)
        mean.add_(nan_unless(codes[n] == 0))
        self._remember(mean, bucket)
        return bucket.result_of(inside)

    def _known(self, bucket: Bucket) -> bool:
        """Whether every parameter has a norm from an earlier step; the same on every rank."""
        names, memory = bucket.layout.names, bucket.memory
        return bool(names) and all(memory.get(_NORM.key, name) is not None for name in names)

    def _remember(self, mean: Tensor, bucket: Bucket) -> None:
        """Updates the norms by the averaged gradient, which is the same on every rank."""
        sizes = bucket.layout.sizes
        if not sizes:
            return
        new = mean.new_empty(len(sizes), dtype=torch.float64)
        squared_norms(mean.contiguous(), new, sizes)  # a call for all parameters
        if self._known(bucket):
            new = torch.lerp(new, bucket.read(_NORM), self.decay)
        bucket.write(_NORM, new)


def _all_finite(bucket: Bucket) -> Tensor:
    finite = all_finite(bucket.raw)
    return finite if bucket.residual is None else finite & all_finite(bucket.residual)
