"""Defines EDEN and DRIVE: unbiased quantisation of rotated blocks to levels of N(0, 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from commhooks.core._packed import BlockCodec, Pattern, Piece, Randomness, Shards
from commhooks.core._registry import register_scheme
from commhooks.core._traits import ErrorKind, Unbiased
from commhooks.kernels import (
    Segments,
    dequantize_levels,
    hadamard,
    level_bytes,
    quantize_levels,
)

__all__ = ["Eden"]

_BLOCKS = (128, 256, 512, 1024, 2048)
# Upper bounds of E|C(x) - x|^2 / |x|^2 for 1 to 4 bits. Rotated entries z, of mean square 1,
# are sums of entries with random signs, so their even moments are at most those of N(0, 1)
# (Khintchine). The error is A / G^2 - 1 with A = mean c(z)^2 and G = mean c(z) z. One bit:
# A / G^2 = 1 / mean(|z|)^2 <= mean z^4 (Hoelder) <= 3. More bits: the same by a linear program over
# distributions of z with moments 4 to 12.
_MOST = (2.0, 0.45, 0.11, 0.029)


@register_scheme("eden")
@dataclass(frozen=True)
class Eden(BlockCodec):
    """Sends each rotated block as the nearest of 2^bits levels, and a scale that makes it unbiased.

    After a random rotation the entries of a block are nearly normal, so the levels are those of
    Lloyd and Max for N(0, 1). The scale is ``|y|^2 / <c, y>`` for rotated entries y and their
    levels c: the mean over rotations is the gradient. One bit is DRIVE. The second phase of
    "two_phase" uses another rotation, since the mean that it rounds depends on the first one.

    Unbiased, without memory. The squared error is 0.57, 0.13, 0.036 and 0.0094 of |x|^2 at 1 to 4
    bits. It can be larger for a block with no more than about ten entries that are not zero, whose
    rotated entries have few different values: 1.5 at 1 bit for four equal entries. The declared
    ``variance`` is a bound for any block. Payload: bits + 32 / block bits per entry.

    Args:
        bits: bits per entry, 1 to 4.
        block: entries per scale and rotation: 128 to 2048, a power of two.
        pattern: "two_phase" or "all_gather".

    References: Vargaftik et al., EDEN, 2022, and DRIVE, 2021.
    """

    bits: int = 1
    block: int = 256
    pattern: Pattern = "two_phase"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 4:
            raise ValueError(f"Eden(bits=...) is 1 to 4, got {self.bits!r}")
        if self.block not in _BLOCKS:
            allowed = ", ".join(map(str, _BLOCKS))
            raise ValueError(f"Eden(block=...) is one of {allowed}, got {self.block!r}")

    @property
    def error(self) -> ErrorKind:
        return Unbiased(_MOST[self.bits - 1])

    def segments(self, rows: Sequence[Sequence[int]]) -> Segments:
        return Segments(rows, self.granularity, 0)

    def row_bytes(self, segments: Segments) -> int:
        return level_bytes(segments.slots, self.bits, self.block)

    def repack_shard(
        self,
        received: Tensor,
        shards: Shards,
        index: int,
        random: Randomness,
        unsent: Tensor | None,
        weight: int,
    ) -> Tensor:
        begin, end, _ = shards[index]
        total = torch.empty(end - begin, dtype=torch.float32, device=received.device)
        self.unpack_shard(received, shards, index, total, random.first, 1.0 / len(received))
        error = None if unsent is None else torch.empty_like(unsent[begin:end])
        packed = self.pack_shard(Piece(total, None, error), shards, index, random)
        if unsent is not None and error is not None:
            unsent[begin:end].add_(error, alpha=float(weight))
        return packed

    def encode(
        self, piece: Piece, payload: Tensor, segments: Segments, row: int, random: Randomness
    ) -> None:
        slots = segments.slots * (len(segments.rows) if row < 0 else 1)
        rotated = piece.x.new_empty(slots, dtype=torch.float32)
        key = random.per_phase
        hadamard(piece.corrected, rotated, self.block, key, segments=segments, row=row)
        # The error takes the place of the rotated entries, and is rotated back.
        error = None if piece.unsent is None else rotated
        levels = _levels(self.bits)
        quantize_levels(rotated, levels, payload, self.block, shard=segments.slots, unsent=error)
        if piece.unsent is not None:
            hadamard(
                *(rotated, piece.unsent, self.block, key), segments=segments, row=row, inverse=True
            )

    def decode(
        self,
        payloads: Tensor,
        out: Tensor,
        segments: Segments,
        row: int,
        random: Randomness,
        factor: float,
    ) -> None:
        slots = segments.slots * (len(segments.rows) if row < 0 else 1)
        total = torch.empty(slots, dtype=torch.float32, device=out.device)
        # Rotation is linear: the sum is rotated back, once, and not each rank's payload.
        levels, key = _levels(self.bits), random.per_phase
        dequantize_levels(payloads, levels, total, self.block, shard=segments.slots, factor=factor)
        back = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        hadamard(total, back, self.block, key, segments=segments, row=row, inverse=True)
        if back is not out:
            out.copy_(back)


@lru_cache(maxsize=32)
def _levels(bits: int) -> Tensor:
    """Computes the 2^bits levels of N(0, 1) with the least mean square error, on the host.

    Lloyd's iteration on the density: each level becomes the mean of the values nearest to it.
    """
    count, normal = 2**bits, NormalDist()
    levels = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    for _ in range(2000):  # converged in float32, also for 16 levels
        bounds = [(a + b) / 2 for a, b in pairwise(levels)]
        density = [0.0, *map(normal.pdf, bounds), 0.0]
        mass = [0.0, *map(normal.cdf, bounds), 1.0]
        levels = [(density[i] - density[i + 1]) / (mass[i + 1] - mass[i]) for i in range(count)]
    return torch.tensor(levels, dtype=torch.float32, device="cpu")
