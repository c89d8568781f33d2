"""Defines signSGD with a majority vote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._packed import PackedCodec, Pattern, Piece, Randomness, Shards
from commhooks.core._registry import register_scheme
from commhooks.core._traits import Biased, ErrorKind, Traits
from commhooks.kernels import count_votes, pack_votes, vote_bytes

__all__ = ["SignSGD"]


@register_scheme("signsgd")
@dataclass(frozen=True)
class SignSGD(PackedCodec):
    """Sends signs and returns the sign that most ranks sent, times ``scale``; a tie is positive.

    For reference: does not converge where the ranks' gradients differ much or are dominated by few
    large entries, needs a learning rate for signs, and has no error to feed back. Prefer
    ``onebit``.

    Args:
        scale: magnitude of each entry of the result.
        pattern: "two_phase" or "all_gather".

    Example:
        >>> hook = register(ddp_model, "signsgd")

    Reference: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018.
    """

    scale: float = 1.0
    pattern: Pattern = "two_phase"

    @property
    def error(self) -> ErrorKind:
        return Biased()

    @property
    def traits(self) -> Traits:
        return super().traits._replace(returns="update")

    granularity = 8

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"SignSGD(scale=...) is above 0, got {self.scale!r}")

    def payload_bytes(self, n: int) -> int:
        return vote_bytes(n)  # the last byte: whether all are finite

    # One payload, or a row of a message per shard: the kernels take both. Signs are an update,
    # around which there is no feedback.

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        pack_votes(piece.x, payload)

    def pack_shards(self, piece: Piece, shards: Shards, random: Randomness) -> Tensor:
        rows = piece.x.new_empty(len(shards), shards[0].nbytes, dtype=torch.uint8)
        pack_votes(piece.x, rows, shard=shards[0].end)
        return rows

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        count_votes(payloads, out, self.scale)

    def unpack_shards(self, rows: Tensor, out: Tensor, shards: Shards, random: Randomness) -> None:
        count_votes(rows[None], out, self.scale, shard=shards[0].end)

    def repack_shard(
        self,
        received: Tensor,
        shards: Shards,
        index: int,
        random: Randomness,
        unsent: Tensor | None,
        weight: int,
    ) -> Tensor:
        (begin, end, _), length = shards[index], shards[0].end
        total = torch.empty(end - begin, dtype=torch.float32, device=received.device)
        packed = received.new_empty(shards[0].nbytes)
        count_votes(received, total, self.scale, shard=length)
        pack_votes(total, packed, shard=length)
        return packed
