"""Defines EDEN and DRIVE: unbiased quantisation of rotated blocks to levels of N(0, 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core.packed import PackedCodec, Pattern, Piece, Randomness, Shard
from commhooks.core.registry import register_scheme
from commhooks.core.traits import ErrorKind, Unbiased
from commhooks.kernels import dequantize_levels, hadamard, level_bytes, quantize_levels

__all__ = ["Eden"]

_BLOCKS = (128, 256, 512, 1024, 2048)
# Upper bounds of E|C(x) - x|^2 / |x|^2 for 1 to 4 bits. Rotated entries z, of mean square 1,
# are sums of entries with random signs, so their even moments are at most those of N(0, 1)
# (Khintchine). The error is A / G^2 - 1 with A = mean c(z)^2 and G = mean c(z) z. One bit:
# A / G^2 = 1 / mean(|z|)^2 <= mean z^4 (Hoelder) <= 3. More bits: the same by a linear program over
# distributions of z with moments 4 to 12.
_MOST = (2.0, 0.45, 0.11, 0.029)


@register_scheme("eden", "drive")
@dataclass(frozen=True)
class Eden(PackedCodec):
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
    block: int = 1024
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

    @property
    def granularity(self) -> int:
        return self.block

    def payload_bytes(self, n: int) -> int:
        return level_bytes(n, self.bits, self.block)

    # One payload, or a row of a message per shard: the kernels take both.

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        self._encode(piece, payload, self._padded(piece.x.numel()), random)

    def pack_shards(self, piece: Piece, shards: Sequence[Shard], random: Randomness) -> Tensor:
        rows = piece.x.new_empty(len(shards), shards[0].nbytes, dtype=torch.uint8)
        self._encode(piece, rows, self._padded(shards[0].end), random)
        return rows

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        self._decode(payloads, out, self._padded(out.numel()), random, factor)

    def unpack_shards(
        self, rows: Tensor, out: Tensor, shards: Sequence[Shard], random: Randomness
    ) -> None:
        self._decode(rows[None], out, self._padded(shards[0].end), random, 1.0)

    def unpack_shard(
        self,
        received: Tensor,
        shards: Sequence[Shard],
        index: int,
        out: Tensor,
        random: Randomness,
        factor: float,
    ) -> None:
        self._decode(received, out, self._padded(shards[0].end), random.row(index), factor)

    def repack_shard(
        self,
        received: Tensor,
        shards: Sequence[Shard],
        index: int,
        random: Randomness,
        unsent: Tensor | None,
        weight: int,
    ) -> Tensor:
        begin, end, _ = shards[index]
        total = torch.empty(end - begin, dtype=torch.float32, device=received.device)
        self.unpack_shard(received, shards, index, total, random.first, 1.0 / len(received))
        error = None if unsent is None else torch.empty_like(unsent[begin:end])
        packed = received.new_empty(shards[0].nbytes)
        piece = Piece(total, None, error)
        self._encode(piece, packed, self._padded(shards[0].end), random.row(index))
        if unsent is not None and error is not None:
            unsent[begin:end].add_(error, alpha=float(weight))
        return packed

    def _padded(self, n: int) -> int:
        return -(-n // self.block) * self.block

    def _encode(self, piece: Piece, payload: Tensor, shard: int, random: Randomness) -> None:
        n, unsent = piece.x.numel(), piece.unsent
        c, padding = piece.corrected, -n % self.block
        if padding:
            c = pad(c, (0, padding))
        rotated = torch.empty_like(c)
        payload.zero_()  # what no block fills travels, too: the same bytes in every run
        hadamard(c, rotated, self.block, random.per_phase, shard=shard)
        # The error takes the place of the rotated entries, and is rotated back in place.
        error = None if unsent is None else rotated
        levels = _levels(self.bits)
        quantize_levels(rotated, levels, payload, self.block, shard=shard, unsent=error)
        if unsent is not None:
            hadamard(rotated, rotated, self.block, random.per_phase, shard=shard, inverse=True)
            unsent.copy_(rotated[:n])

    def _decode(
        self, payloads: Tensor, out: Tensor, shard: int, random: Randomness, factor: float
    ) -> None:
        n = out.numel()
        total = torch.empty(self._padded(n), dtype=torch.float32, device=out.device)
        # Rotation is linear: the sum is rotated back, once, and not each rank's payload.
        levels = _levels(self.bits)
        dequantize_levels(payloads, levels, total, self.block, shard=shard)
        hadamard(total, total, self.block, random.per_phase, shard=shard, inverse=True)
        out.copy_(total[:n] if factor == 1.0 else total[:n].mul_(factor))


@lru_cache(maxsize=32)
def _levels(bits: int) -> Tensor:
    """Computes the 2^bits levels of N(0, 1) with the least mean square error, on the host.

    Lloyd's iteration on the density: each level becomes the mean of the values nearest to it.
    """
    count = 2**bits
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64, device="cpu"), 1.0)
    levels = normal.icdf((torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) / count)
    ends = torch.tensor([-math.inf, math.inf], dtype=torch.float64, device="cpu")
    for _ in range(2000):  # converged in float32, also for 16 levels
        bounds = (levels[1:] + levels[:-1]) / 2
        edges = torch.cat([ends[:1], bounds, ends[1:]])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(edges)
        levels = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
    rounded: Tensor = levels.float()
    return rounded
