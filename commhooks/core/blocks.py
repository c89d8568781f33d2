"""Defines ``BlockCodec``, a packed codec of blocks that begin at parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from commhooks.core.packed import PackedCodec, Piece, Randomness, Shards
from commhooks.kernels import Segments

__all__ = ["BlockCodec", "one_segment"]


class BlockCodec(PackedCodec):
    """Packs shards by kernels that take all of them at once, or one of them in the layout of all.

    Subclasses implement ``segments``, ``row_bytes``, ``encode`` and ``decode``.

    Attributes:
        block: entries per scale.
    """

    block: int
    per_parameter: ClassVar[bool] = True

    @property
    def granularity(self) -> int:
        return max(256, self.block)

    def segments(self, rows: Sequence[Sequence[int]]) -> Segments:
        raise NotImplementedError

    def encode(
        self, piece: Piece, payload: Tensor, segments: Segments, row: int, random: Randomness
    ) -> None:
        """Writes the payload of a row, or of all rows where ``row`` is -1."""
        raise NotImplementedError

    def decode(
        self,
        payloads: Tensor,
        out: Tensor,
        segments: Segments,
        row: int,
        random: Randomness,
        factor: float,
    ) -> None:
        """Writes the sum of the decoded payloads of a row, or of all rows, times ``factor``."""
        raise NotImplementedError

    def payload_bytes(self, n: int) -> int:
        return self.row_bytes(one_segment(self, n))

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        self.encode(piece, payload, one_segment(self, piece.x.numel()), -1, random)

    def pack_shards(self, piece: Piece, shards: Shards, random: Randomness) -> Tensor:
        rows = piece.x.new_empty(len(shards), shards[0].nbytes, dtype=torch.uint8)
        self.encode(piece, rows, _segments_of(shards), -1, random)
        return rows

    def pack_shard(self, piece: Piece, shards: Shards, index: int, random: Randomness) -> Tensor:
        row = piece.x.new_empty(shards[0].nbytes, dtype=torch.uint8)
        self.encode(piece, row, _segments_of(shards), index, random.row(index))
        return row

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        self.decode(payloads, out, one_segment(self, out.numel()), -1, random, factor)

    def unpack_shard(
        self,
        received: Tensor,
        shards: Shards,
        index: int,
        out: Tensor,
        random: Randomness,
        factor: float,
    ) -> None:
        self.decode(received, out, _segments_of(shards), index, random.row(index), factor)

    def unpack_shards(self, rows: Tensor, out: Tensor, shards: Shards, random: Randomness) -> None:
        self.decode(rows[None], out, _segments_of(shards), -1, random, 1.0)


def _segments_of(shards: Shards) -> Segments:
    assert shards.segments is not None, "shards of this codec"
    return shards.segments


@lru_cache(maxsize=1024)
def one_segment(codec: BlockCodec, n: int) -> Segments:
    """Returns where blocks begin in ``n`` entries of which no parameters are known."""
    return codec.segments([[n]])
