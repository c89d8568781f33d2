"""The 16-bit schemes by name: fp16 and bf16, summed in 16 bits or in 32."""

from __future__ import annotations

import torch

from commhooks._cast import Cast
from commhooks._registry import register_scheme
from commhooks._scheme import Scheme
from commhooks.schemes.dense import Dense, TwoPhaseCast

__all__ = ["bf16", "fp16"]


@register_scheme("fp16")
def fp16(*, fp32_sum: bool = False) -> Scheme:
    """Averages in float16: half the bytes; divides before the cast.

    Args:
        fp32_sum: sum in float32 (all-to-all, sum, all-gather) instead of in float16 along a ring.
    """
    return TwoPhaseCast(torch.float16) if fp32_sum else Cast(Dense(), torch.float16)


@register_scheme("bf16")
def bf16(*, fp32_sum: bool = False) -> Scheme:
    """Averages in bfloat16: half the bytes, the range of float32, 8 significant bits.

    Args:
        fp32_sum: sum in float32 (all-to-all, sum, all-gather) instead of in bfloat16 along a ring.
    """
    return TwoPhaseCast(torch.bfloat16) if fp32_sum else Cast(Dense(), torch.bfloat16)
