"""Defines ``TwoPhase``, the two-phase exchange of codecs given by ``encode`` and ``decode``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket
from commhooks.core._layout import Layout
from commhooks.core._packed import PackedCodec, Piece, Randomness
from commhooks.core._scheme import (
    Codec,
    check_decoded,
    checked_payload,
    pack_payload,
    unpack_payload,
)
from commhooks.core._traits import ErrorKind, Traits, composed
from commhooks.errors import SchemeError

__all__ = ["TwoPhase"]


@dataclass(frozen=True)
class TwoPhase(PackedCodec):
    """Exchanges a codec's payloads in two phases, not by one all-gather.

    Every rank encodes each shard of the bucket separately, sums one shard of all ranks in float32,
    and encodes its mean. Received bytes then do not grow with the number of ranks; in return the
    mean is rounded once more.

    Args:
        codec: a codec whose payload depends on the number of entries, not on the bucket's layout.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(TwoPhase(QSGD(block=64))))
    """

    codec: Codec

    @property
    def error(self) -> ErrorKind:
        error = self.codec.traits.error
        return composed(error, error)  # on one rank, where the error is largest: rounded twice

    @property
    def traits(self) -> Traits:
        inside = self.codec.traits
        return super().traits._replace(
            returns=inside.returns, agrees=inside.agrees, max_bucket_numel=inside.max_bucket_numel
        )

    def payload_bytes(self, n: int) -> int:
        return -(-sum(value.nbytes for value in _example(self.codec, n).values()) // 16) * 16

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        c, bucket = piece.corrected, random.bucket
        encoded = checked_payload(self.codec, self.codec.encode(c, bucket))
        flat = pack_payload(encoded)
        if flat.numel() > payload.numel():
            raise SchemeError(
                f"{type(self.codec).__name__}.encode: {flat.numel()} bytes for {c.numel()} "
                f"entries, {payload.numel()} for as many zeros: sizes may not depend on values"
            )
        payload[: flat.numel()] = flat
        if piece.unsent is not None:
            decoded = self.codec.decode(encoded, c, bucket)
            check_decoded(self.codec, decoded, c)
            torch.sub(c, decoded, out=piece.unsent)

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        total = torch.zeros_like(out, dtype=torch.float32)
        like = _example(self.codec, out.numel())
        for row in payloads:
            size = sum(value.nbytes for value in like.values())
            decoded = self.codec.decode(unpack_payload(row[:size], like), total, random.bucket)
            check_decoded(self.codec, decoded, total)
            total += decoded
        out.copy_(total.mul_(factor))


@lru_cache(maxsize=1024)
def _example(codec: Codec, n: int) -> dict[str, Tensor]:
    """Returns the payload of ``n`` zeros without its values: names, shapes and dtypes."""
    # Payload sizes are needed before anything is encoded, and codecs do not declare them.
    zeros = torch.zeros(n, dtype=torch.float32, device="cpu")
    bucket = Bucket(zeros, Layout(["shard"], [(n,)]))
    payload = checked_payload(codec, codec.encode(zeros, bucket))
    return {name: torch.empty_like(value, device="meta") for name, value in payload.items()}
