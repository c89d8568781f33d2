"""Defines the 16-bit schemes fp16 and bf16, with sums in 16 bits or in 32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._dense import Dense
from commhooks.core._packed import PackedCodec, Piece, Randomness, Shards
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.kernels import scaled_cast
from commhooks.wrappers._cast import Cast

__all__ = ["TwoPhaseCast", "bf16", "fp16"]


@dataclass(frozen=True)
class TwoPhaseCast(PackedCodec):
    """Averages with 16 bits per entry sent and 32 in the sum.

    Each rank sums one shard of the bucket: all-to-all of the cast gradient, sum in float32,
    all-gather of the cast mean. The error is two roundings on any number of ranks; a 16-bit ring
    sum rounds once per rank. Payloads are divided by the number of ranks.

    Args:
        dtype: of payloads: ``torch.float16`` or ``torch.bfloat16``; ``torch.float32`` is for the
            ranks of a node in :class:`Hierarchical`.
        stochastic: rounds up or down at random, unbiased.
    """

    dtype: torch.dtype = torch.bfloat16
    stochastic: bool = False
    per_parameter = keeps_zeros = True

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(
                f"TwoPhaseCast(dtype=...) is float16, bfloat16 or float32, got {self.dtype}"
            )

    @property
    def granularity(self) -> int:
        return 8  # entries of 16 bytes, to a multiple of which rows are padded: none is

    def payload_bytes(self, n: int) -> int:
        return -(-n * self.dtype.itemsize // 16) * 16

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        narrow, n = payload.view(self.dtype), piece.x.numel()
        narrow[n:].zero_()  # padding travels, too: the same bytes in every run
        self._cast(piece, narrow[:n], random)

    def pack_shards(self, piece: Piece, shards: Shards, random: Randomness) -> Tensor:
        # Rows are not padded, so that together they are the whole bucket.
        rows = piece.x.new_empty(len(shards), shards[0].nbytes, dtype=torch.uint8)
        self.pack(piece, rows.view(-1), random)
        return rows

    def _cast(self, piece: Piece, narrow: Tensor, random: Randomness) -> None:
        # A share, as in ``Cast``: sums of shares stay within the range of the gradients.
        ranks = random.bucket.world_size
        c = piece.x if piece.residual is None else piece.corrected
        if self.stochastic and self.dtype != torch.float32:
            # Divided before the cast: a float16 share of a large gradient would overflow.
            scaled_cast(c.to(torch.float32), 1.0 / ranks, narrow, random=random.noise)
        else:
            scaled_cast(c, 1.0 / ranks, narrow)
        if piece.unsent is not None:
            torch.sub(c, narrow.to(torch.float32), alpha=float(ranks), out=piece.unsent)

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        rows = payloads.view(self.dtype)[:, : out.numel()]
        total = rows[0].to(torch.float32) if len(rows) == 1 else rows.sum(0, dtype=torch.float32)
        factor *= random.bucket.world_size
        out.copy_(total if factor == 1.0 else total.mul_(factor))

    def unpack_shards(self, rows: Tensor, out: Tensor, shards: Shards, random: Randomness) -> None:
        self.unpack(rows.view(1, -1), out, random, 1.0)


def _sixteen_bits(dtype: torch.dtype, fp32_sum: bool, stochastic: bool) -> Scheme:
    if fp32_sum or stochastic:
        return TwoPhaseCast(dtype, stochastic)
    return Cast(Dense(), dtype)


@register_scheme("fp16")
def fp16(*, fp32_sum: bool = False, stochastic: bool = False) -> Scheme:
    """Averages in float16: half the bytes; divides before the cast.

    Args:
        fp32_sum: sums in float32 (all-to-all, sum, all-gather) instead of in float16 along a ring.
        stochastic: rounds up or down at random, unbiased; sums in float32.
    """
    return _sixteen_bits(torch.float16, fp32_sum, stochastic)


@register_scheme("bf16")
def bf16(*, fp32_sum: bool = False, stochastic: bool = False) -> Scheme:
    """Averages in bfloat16: half the bytes, the range of float32, 8 significant bits.

    Args:
        fp32_sum, stochastic: as for fp16.
    """
    return _sixteen_bits(torch.bfloat16, fp32_sum, stochastic)
