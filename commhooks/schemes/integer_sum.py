"""8-bit integers of a scale that all ranks share, summed by one all-reduce of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, SchemeExchange, nan_unless
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Scheme
from commhooks.core.slot import Number
from commhooks.core.step_info import StepInfo
from commhooks.core.traits import Biased, Traits, Unbiased
from commhooks.kernels import all_finite, dequantize_shared, largest_magnitudes, quantize_shared
from ddp_core import AllReduce

__all__ = ["GlobalQSGD", "IntSGD"]

_TOP = 127
_WHOLE = 2**31  # a block that holds any bucket


@dataclass(frozen=True)
class _Squares(Number):
    """The moving average of a parameter's squared norm; in float64 no square underflows."""

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> None:
        return None  # the first step is dense


_NORM = _Squares("intsgd.norm")


@register_scheme("global_qsgd")
@dataclass(frozen=True)
class GlobalQSGD(Scheme):
    """Sends 8-bit integers of a scale per block that the ranks agree on first, and sums those.

    The largest magnitude of each block over all ranks stands for ``127 // n`` levels on n ranks, so
    that the sum of n codes cannot wrap. One all-reduce of 4 / block bytes an entry, then one of a
    byte. Levels become few where ranks are many: 63 for 2, 15 for 8, 3 for 32; above 127 ranks the
    bucket travels dense. Unbiased.

    Args:
        block: entries per scale, a multiple of 256.
        stochastic: False rounds to nearest: half the error, but with a bias.

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
        unbiased = Unbiased(self.block / (4.0 * _TOP**2))
        return Traits(rounds=2, error=unbiased if self.stochastic else Biased())

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n, levels, block = bucket.raw.numel(), _TOP // bucket.world_size, self.block
        blocks = -(-n // block)
        if not levels or n + 4 * blocks >= bucket.raw.nbytes:
            return (yield from bucket.all_reduce())
        inside = bucket.in_float32()
        x, residual = inside.raw, inside.residual
        largest = x.new_empty(blocks, dtype=torch.int32)
        largest_magnitudes(x, largest, block, residual=residual)
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
    """Sends 8-bit integers of a scale that follows from past steps, so that none need be agreed on.

    On n ranks a level is ``sqrt(2 n r / d) / precision``, r being a moving average of the averaged
    gradient's square and d its number of entries. One all-reduce of a byte an entry. What exceeds
    ``127 // n`` levels is clipped, as where a gradient is suddenly larger; unbiased otherwise. The
    first step is dense, as are all above 127 ranks.

    Args:
        precision: levels per ``sqrt(2 n)`` root mean squares.
        decay: weight of the old average, 0 <= decay < 1.
        stochastic: False rounds to nearest, with a bias.

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
        unbiased = Unbiased(1 / (2 * self.precision**2))
        return Traits(error=unbiased if self.stochastic else Biased())

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n, levels = bucket.raw.numel(), _TOP // bucket.world_size
        if not self._known(bucket) or not levels or n + 1 >= bucket.raw.nbytes:
            result = yield from bucket.all_reduce()
            self._remember(result.mean, bucket)
            return result
        inside = bucket.in_float32()
        squares = bucket.read(_NORM).sum()
        # A magnitude that never vanishes: from zero gradients there is a way back.
        level = torch.sqrt(2.0 * bucket.world_size / n * squares).clamp(min=1e-20) / self.precision
        magnitude = (level * levels).float().view(1).view(torch.int32)
        codes = inside.raw.new_empty(n + 1, dtype=torch.int8)
        noise = bucket.random("noise", shared=False) if self.stochastic else None
        parts = {"residual": inside.residual, "unsent": inside.unsent}
        quantize_shared(inside.raw, magnitude, codes[:n], _WHOLE, levels, **parts, random=noise)
        codes[n] = ~_all_finite(inside)
        codes = yield AllReduce(codes, "sum")
        mean, factor = inside.output, 1.0 / bucket.world_size
        dequantize_shared(codes[:n], magnitude, mean, _WHOLE, levels, factor=factor)
        mean.add_(nan_unless(codes[n] == 0))
        self._remember(mean, bucket)
        return bucket.result_of(inside)

    def _known(self, bucket: Bucket) -> bool:
        """Whether every parameter's norm is known, which all ranks answer with the same."""
        names = bucket.layout.names
        return bool(names) and all(bucket.memory.get(_NORM.key, one) is not None for one in names)

    def _remember(self, mean: Tensor, bucket: Bucket) -> None:
        layout = bucket.layout
        pieces = [piece.double() for piece in mean.split(layout.sizes)]
        if not pieces:
            return
        new = torch.stack([piece.square().sum() for piece in pieces])
        if self._known(bucket):
            new = torch.lerp(new, bucket.read(_NORM), self.decay)
        bucket.write(_NORM, new)


def _all_finite(bucket: Bucket) -> Tensor:
    finite = all_finite(bucket.raw)
    return finite if bucket.residual is None else finite & all_finite(bucket.residual)
