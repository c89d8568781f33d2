"""Finds the codec that packs differences: what an owner has, minus what all other ranks have.

What rounding leaves of one difference is a part of the next.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from commhooks.core.packed import PackedCodec
from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.schemes.quantized import Blockwise
from commhooks.wrappers.make import make

__all__ = ["codec_of_differences"]

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def codec_of_differences(scheme: str | Scheme, call: str) -> PackedCodec | None:
    """Returns the codec of a scheme, which rounds to nearest if it comes by its name.

    Args:
        scheme: a registered name, or a scheme.
        call: the public call, for the messages.

    Returns:
        The codec; None: the scheme is "none", which rounds nothing.

    Raises:
        RegistrationError: the scheme packs no shard by itself, or rounds so coarsely that what is
            not sent would grow.
    """
    codec: Any = make(scheme, error_feedback=False)
    if codec == make("none"):
        return None
    if isinstance(scheme, str) and scheme in _CASTS:
        return TwoPhaseCast(_CASTS[scheme])
    if not isinstance(codec, PackedCodec) or codec.traits.returns != "mean":
        raise RegistrationError(
            f"{call}: {codec} does not pack a shard by itself; choose bf16, fp16, int8, int4, fp8, "
            f"mxfp8, onebit, eden or topk"
        )
    if isinstance(scheme, str) and isinstance(codec, Blockwise):
        # The owner keeps the error: to nearest, which needs no draws, loses nothing.
        return codec.to_nearest()
    if not math.isfinite(codec.error.variance) or codec.error.variance > 1:
        raise RegistrationError(
            f"{call}: {codec} has a variance of {codec.error.variance:.3g}, and what the owner has "
            f"not sent would grow; use more bits, or one that rounds to nearest"
        )
    return codec
