"""Defines QSGD and TernGrad: random rounding to few levels of a block's norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Codec
from commhooks.core._traits import Traits, Unbiased
from commhooks.kernels import dequantize, payload_bytes, quantize, quantize_norms
from commhooks.kernels._blockwise import layout_of, one_segment

__all__ = ["QSGD", "TernGrad"]


@register_scheme("qsgd")
@dataclass(frozen=True)
class QSGD(Codec):
    """Sends levels of each block's Euclidean norm, rounded at random: unbiased, without state.

    For reference: the norm is far above most entries, so 8-bit integers of the block's maximum
    (``int8``) have a fifth of the squared error for as many bytes. Variance: at most
    min(block / levels^2, sqrt(block) / levels). Payload: 8 bits per entry and 32 per block.

    Args:
        levels: number of levels, 1 to 127. Fewer levels do not save bytes: codes are not of
            variable length here.
        block: entries per norm, a power of two, 32 to 2048.

    Reference: Alistarh et al., QSGD, 2017.
    """

    levels: int = 127
    block: int = 128

    def __post_init__(self) -> None:
        layout_of("QSGD", "int8", self.block, 0)  # checks the block
        if not 1 <= self.levels <= 127:
            raise ValueError(f"QSGD(levels=...) is 1 to 127, got {self.levels!r}")

    @property
    def traits(self) -> Traits:
        variance = min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)
        return Traits(error=Unbiased(variance))

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        # Different bits on each rank: errors then average out over ranks.
        random = bucket.random("qsgd", shared=False)
        payload = _empty(gradient, "int8", self.block, whole=True)
        quantize_norms(_in_float32(gradient), payload, self.block, self.levels, random)
        return {"payload": payload}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return _decoded(payload["payload"], like, "int8", self.block, whole=True)


@register_scheme("terngrad")
@dataclass(frozen=True)
class TernGrad(Codec):
    """Sends -1, 0 or 1 times each block's largest magnitude, at random: unbiased, without state.

    For reference: an entry is sent with probability |x| / max, so most of the result is noise: 1.6
    times the squared norm of a gradient of normal entries. Variance: exactly
    |x|_max |x|_1 / |x|^2 - 1, at most (sqrt(block) - 1) / 2. Payload: 2 bits per entry, 32 per
    block; that of ``Blockwise("int2", rounding="stochastic")``.

    Args:
        block: entries per scale, a power of two, 128 to 2048.

    Reference: Wen et al., TernGrad, 2017 (without its clipping, which is a bias).
    """

    block: int = 512

    def __post_init__(self) -> None:
        layout_of("TernGrad", "int2", self.block, 0)  # checks the block

    @property
    def traits(self) -> Traits:
        return Traits(error=Unbiased((math.sqrt(self.block) - 1) / 2))

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        # Rounding x / max to -1, 0 or 1 at random is to send it with probability |x| / max.
        random = bucket.random("terngrad", shared=False)
        payload = _empty(gradient, "int2", self.block)
        quantize(_in_float32(gradient), payload, "int2", self.block, random=random)
        return {"payload": payload}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return _decoded(payload["payload"], like, "int2", self.block)


def _in_float32(x: Tensor) -> Tensor:
    """Returns entries in float32 if they are float64, which kernels do not take."""
    return x.to(torch.float32) if x.dtype == torch.float64 else x


def _empty(gradient: Tensor, format: str, block: int, *, whole: bool = False) -> Tensor:
    nbytes = payload_bytes(one_segment(format, block, gradient.numel(), whole), format, block)
    return gradient.new_empty(nbytes, dtype=torch.uint8)


def _decoded(
    payload: Tensor, like: Tensor, format: str, block: int, *, whole: bool = False
) -> Tensor:
    # Rounded to the dtype of ``like`` where it is narrower, as the gradient is.
    wide = like.dtype == torch.float64
    out = torch.empty_like(like, dtype=torch.float32 if wide else like.dtype)
    segments = one_segment(format, block, out.numel(), whole)
    dequantize(payload[None], out, format, block, segments=segments)
    return out.to(like.dtype)
