"""Sends what owners have stepped to all ranks: new values, or packed differences to them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from commhooks._torch import foreach_add
from commhooks.core.dense import Dense
from commhooks.core.packed import PackedCodec
from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.engine import Engine
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.schemes.quantized import Blockwise
from commhooks.wrappers.make import make
from commhooks.zero.shard import BucketShard
from ddp_core import Exchange
from ddp_core._torch import foreach_copy
from ddp_core.reducer.buckets import views_of

__all__ = ["Gather"]

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Gather:
    """Gathers the shards of a bucket.

    Args:
        scheme: "none" sends new values as they are. A codec packs differences: the exact value
            minus the one that all ranks have. What rounding leaves is a part of the next
            difference, so nothing is lost.

    Attributes:
        codec: packs differences; None: values are sent as they are.
    """

    def __init__(self, scheme: str | Scheme) -> None:
        self.codec = _codec_of_differences(scheme)

    def packs(self, shard: BucketShard) -> bool:
        """Whether differences of this bucket are packed: a small payload would save nothing."""
        if self.codec is None:
            return False
        nbytes = self.codec.shards_at(shard.layout, shard.spans)[0].nbytes
        return nbytes < shard.spans[0][1] * shard.dtype.itemsize

    def exchange(self, shard: BucketShard, engine: Engine) -> Exchange:
        """Gathers the shards of one bucket, and returns them one after the other."""
        # Within the exchange, on a GPU on its stream: memory is given back when the exchange is
        # over on the host, and only its own stream knows whether it is still read.
        scheme: Scheme = Dense()
        own = shard.exact.to(shard.dtype)
        if self.codec is not None and self.packs(shard):
            scheme, own = self.codec, shard.exact - shard.held()
        whole = own.new_empty(shard.layout.numel)
        bucket = engine.bucket(own, shard.layout, output=whole)
        return (yield from scheme.all_gather(bucket, shard.spans)).mean

    @torch.no_grad()
    def apply(self, shard: BucketShard, gathered: Tensor) -> None:
        """Writes what :meth:`exchange` returned into the parameters: the same bits on all ranks."""
        parameters = [parameter.detach() for parameter in shard.parameters]
        views, packed = views_of(gathered, parameters), self.packs(shard)
        rows = zip(shard.parameters, parameters, views, strict=True)
        kept = [(into, view) for one, into, view in rows if one not in shard.dropped]
        if kept:
            write = foreach_add if packed else foreach_copy
            write([into for into, _ in kept], [view for _, view in kept])
        shard.settle(rounded=packed or shard.dtype != shard.exact.dtype)


def _codec_of_differences(scheme: str | Scheme) -> PackedCodec | None:
    """Returns the codec of a scheme, which rounds to nearest if it comes by its name.

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
            f"ZeroOptimizer(gather=...): {codec} does not pack a shard by itself; choose bf16, "
            f"fp16, int8, int4, fp8, onebit, eden or topk"
        )
    if isinstance(scheme, str) and isinstance(codec, Blockwise):
        # The owner keeps the error: to nearest, which needs no draws, loses nothing.
        return codec.to_nearest()
    if not math.isfinite(codec.error.variance) or codec.error.variance > 1:
        raise RegistrationError(
            f"ZeroOptimizer(gather=...): {codec} has a variance of {codec.error.variance:.3g}, and "
            f"what the owner has not sent would grow; use more bits, or one that rounds to nearest"
        )
    return codec
