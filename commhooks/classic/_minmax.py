"""Defines affine 8-bit quantisation between minimum and maximum, of a bucket or of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket
from commhooks.core._scheme import Codec
from commhooks.core._traits import Biased, Traits
from commhooks.kernels import dequantize_affine, quantize_affine

__all__ = ["MinMax", "MinMaxPerChannel"]


@dataclass(frozen=True)
class MinMax(Codec):
    """Sends a bucket as 256 equally spaced levels between its minimum and its maximum.

    Zero is always a level, so zero entries arrive as zero; the error of other entries is at most
    half the distance of two levels (one distance where the zero point was rounded the other way).
    If any entry is not finite, neither is the distance, and no entry of the bucket arrives finite,
    on any rank.

    Biased: rounds to the nearest level, so use ``ErrorFeedback`` where it matters. Payload: one
    byte per entry, and five per bucket.

    Reference: ``quantization_pertensor_hook`` of PyTorch.
    """

    traits = Traits(error=Biased())

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return _quantize(gradient, max(gradient.numel(), 1))

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return _dequantize(payload, like, max(like.numel(), 1))


@dataclass(frozen=True)
class MinMaxPerChannel(Codec):
    """Sends each block of a bucket as 256 levels between the block's minimum and maximum.

    As :class:`MinMax`, but a large entry costs the precision of its own block only, and an entry
    that is not finite affects its own block only.

    Biased: rounds to the nearest level. Payload: one byte per entry, and five per block.

    Args:
        block_size: entries per block; the last block may be short.

    Reference: ``quantization_perchannel_hook`` of PyTorch.
    """

    block_size: int = 512

    traits = Traits(error=Biased())

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(
                f"MinMaxPerChannel(block_size=...) is a whole number, 1 or more, "
                f"got {self.block_size!r}"
            )

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return _quantize(gradient, self.block_size)

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return _dequantize(payload, like, self.block_size)


def _quantize(grad: Tensor, block: int) -> dict[str, Tensor]:
    """Returns the payload: levels, and per block their distance and the level of zero."""
    blocks = -(-grad.numel() // block)
    payload = {
        "levels": grad.new_empty(grad.numel(), dtype=torch.uint8),
        "scale": grad.new_empty(blocks, dtype=torch.float32),
        "zero": grad.new_empty(blocks, dtype=torch.uint8),
    }
    # Kernels know no float64; rounding to float32 first is nothing next to 8 bits.
    grad = grad.to(torch.float32) if grad.dtype == torch.float64 else grad
    quantize_affine(grad.contiguous(), payload["levels"], payload["scale"], payload["zero"], block)
    return payload


def _dequantize(payload: dict[str, Tensor], like: Tensor, block: int) -> Tensor:
    """Returns the gradient for the levels of a payload."""
    out = torch.empty_like(like, dtype=torch.float32)
    dequantize_affine(payload["levels"], payload["scale"], payload["zero"], block, out)
    return out.to(like.dtype)
