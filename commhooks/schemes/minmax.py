"""Affine 8-bit quantisation between minimum and maximum, of the whole bucket or of blocks of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks._registry import register_scheme
from commhooks._scheme import Codec, Context

__all__ = ["MinMax", "MinMaxPerChannel"]

_TOP = 255  # the largest level; levels are uint8


@register_scheme("quantization_pertensor")
@dataclass(frozen=True)
class MinMax(Codec):
    """Sends a bucket as 256 equally spaced levels between its minimum and its maximum.

    Zero is always a level, so zero entries arrive as zero; others are off by at most half the
    distance of two levels (a whole one where the zero point was rounded the other way). If any
    entry is not finite, the distance is not either, and no entry arrives finite, on any rank.

    Biased: rounds to the nearest level, so use ``ErrorFeedback`` where it matters. Payload: one
    byte per entry, and five per bucket (nine for float64 gradients).

    Example:
        >>> hook = register(ddp_model, "quantization_pertensor")

    Reference: ``quantization_pertensor_hook`` of PyTorch.
    """

    biased = True

    def encode(self, grad: Tensor, ctx: Context) -> dict[str, Tensor]:
        return _quantize(grad, max(grad.numel(), 1))

    def decode(self, payload: dict[str, Tensor], like: Tensor, ctx: Context) -> Tensor:
        return _dequantize(payload, max(like.numel(), 1)).to(like.dtype)


@register_scheme("quantization_perchannel")
@dataclass(frozen=True)
class MinMaxPerChannel(Codec):
    """Sends each block of a bucket as 256 levels between the block's minimum and maximum.

    As :class:`MinMax`, but a large entry costs the precision of its own block only; what is not
    finite spoils its own block only.

    Biased: rounds to the nearest level. Payload: one byte per entry, and five per block (nine for
    float64 gradients).

    Args:
        block_size: entries per block; the last block may be short.

    Example:
        >>> hook = register(ddp_model, "quantization_perchannel", block_size=128)

    Reference: ``quantization_perchannel_hook`` of PyTorch.
    """

    block_size: int = 512

    biased = True

    def __post_init__(self) -> None:
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"MinMaxPerChannel(block_size=...) is a whole number, 1 or more, got {size!r}"
            )

    def encode(self, grad: Tensor, ctx: Context) -> dict[str, Tensor]:
        return _quantize(grad, self.block_size)

    def decode(self, payload: dict[str, Tensor], like: Tensor, ctx: Context) -> Tensor:
        return _dequantize(payload, self.block_size).to(like.dtype)


def _blocks(flat: Tensor, block_size: int) -> Tensor:
    """``flat`` as rows of ``block_size``, the last filled up with zeros."""
    return pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)


def _quantize(grad: Tensor, block_size: int) -> dict[str, Tensor]:
    """Levels, and per block their distance and the level of zero."""
    blocks = _blocks(grad.to(torch.promote_types(grad.dtype, torch.float32)), block_size)
    low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
    # Divided before the subtraction: high - low may overflow though both are finite.
    scale = high / _TOP - low / _TOP
    divisor = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
    zero = torch.round(-low / divisor).nan_to_num(0.0).clamp(0, _TOP)
    levels = torch.round(blocks / divisor[:, None]) + zero[:, None]
    levels = levels.nan_to_num(0.0).clamp(0, _TOP).to(torch.uint8)
    return {
        "levels": levels.view(-1)[: grad.numel()],
        "scale": scale,
        "zero": zero.to(torch.uint8),
    }


def _dequantize(payload: dict[str, Tensor], block_size: int) -> Tensor:
    """The gradient that the levels stand for."""
    levels, scale = payload["levels"], payload["scale"]
    rows = _blocks(levels, block_size).to(scale.dtype) - payload["zero"].to(scale.dtype)[:, None]
    return (rows * scale[:, None]).view(-1)[: levels.numel()]
