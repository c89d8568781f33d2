"""Defines ``Payloads``, the form of a packed codec's payloads: of one piece, or of shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.core.piece import Piece, Randomness, Shards
from commhooks.core.scheme import Scheme
from commhooks.kernels import Segments

__all__ = ["Payloads"]


class Payloads(Scheme):
    """Packs n entries into a fixed number of bytes, a multiple of 16, and unpacks sums of them.

    The part of a :class:`commhooks.core.PackedCodec` that knows what payloads look like, and not
    how they travel.
    """

    @property
    def granularity(self) -> int:
        """Returns the entries that are encoded together: shards are multiples of them."""
        return 1

    def payload_bytes(self, n: int) -> int:
        """Returns the number of bytes of the payload of ``n`` entries."""
        raise NotImplementedError

    def segments(self, rows: Sequence[Sequence[int]]) -> Segments | None:
        """Returns where blocks begin in the shards of a bucket; None: entries share no blocks.

        A codec of blocks takes care that no block has entries of two parameters, and overrides all
        methods that take shards.

        Args:
            rows: for each shard the number of entries of each parameter in it.
        """
        return None

    def row_bytes(self, segments: Segments) -> int:
        """Returns the number of bytes of a shard's payload; all shards have the same."""
        raise NotImplementedError

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        """Writes the payload of a piece of the bucket, and its error to ``piece.unsent``.

        Args:
            piece: entries and their residual.
            payload: uint8, ``payload_bytes(piece.x.numel())`` entries; written.
            random: random streams of this payload.
        """
        raise NotImplementedError

    def unpack(
        self, payloads: Tensor, out: Tensor, random: Randomness, factor: float
    ) -> Tensor | None:
        """Writes the sum of the decoded rows of ``payloads``, times ``factor``, to ``out``.

        Returns:
            Whether all of ``out`` is finite, one bool; None where nobody has looked.
        """
        raise NotImplementedError

    def repack(
        self,
        payloads: Tensor,
        payload: Tensor,
        n: int,
        random: Randomness,
        factor: float,
        unsent: Tensor | None = None,
    ) -> None:
        """Unpacks the sum of ``payloads`` and packs it: the middle of the two-phase exchange."""
        total = torch.empty(n, dtype=torch.float32, device=payload.device)
        self.unpack(payloads, total, random.first, factor)
        self.pack(Piece(total, None, unsent), payload, random)

    # The methods below work shard by shard. A codec whose kernels take all shards at once
    # overrides them: on a GPU a launch per shard costs more host time than the line is busy
    # (docs/design/kernels.md).

    def pack_shards(self, piece: Piece, shards: Shards, random: Randomness) -> Tensor:
        """Packs each shard of a piece into a row of bytes; all rows have the same length."""
        # Zeros: the end of a short shard's row travels, too, and is to be the same in every run.
        rows = piece.x.new_zeros(len(shards), shards[0].nbytes, dtype=torch.uint8)
        for index, (begin, end, nbytes) in enumerate(shards):
            if begin < end:
                self.pack(piece.part(begin, end), rows[index, :nbytes], random.row(index))
        return rows

    def pack_shard(self, piece: Piece, shards: Shards, index: int, random: Randomness) -> Tensor:
        """Packs one shard, whose entries are ``piece``, into a row as of :meth:`pack_shards`."""
        begin, end, nbytes = shards[index]
        row = piece.x.new_empty(shards[0].nbytes, dtype=torch.uint8)
        if nbytes < row.numel() or begin == end:
            row.zero_()  # the end of a short shard's row travels, too
        if begin < end:
            self.pack(piece, row[:nbytes], random.row(index))
        return row

    def unpack_shard(
        self,
        received: Tensor,
        shards: Shards,
        index: int,
        out: Tensor,
        random: Randomness,
        factor: float,
    ) -> Tensor | None:
        """Writes the sum of the payloads of one shard, times ``factor``, to ``out``.

        Returns:
            As :meth:`unpack`.
        """
        begin, end, nbytes = shards[index]
        if begin == end:
            return None
        return self.unpack(received[:, :nbytes].contiguous(), out, random.row(index), factor)

    def repack_shard(
        self,
        received: Tensor,
        shards: Shards,
        index: int,
        random: Randomness,
        unsent: Tensor | None,
        weight: int,
    ) -> Tensor:
        """Packs the mean of the payloads of one shard, received from several ranks.

        Args:
            received: uint8, a row per rank.
            shards: all shards.
            index: the shard that was received.
            random: the streams of the second phase.
            unsent: takes ``weight`` times the error of packing the mean.
            weight: the number of ranks that the mean is of. No other rank knows the error, so this
                one sends it later; in the mean its gradient counts one ``weight``-th.
        """
        begin, end, nbytes = shards[index]
        packed = received.new_zeros(shards[0].nbytes)
        if begin < end:
            error = None if unsent is None else torch.empty_like(unsent[begin:end])
            rows = received[:, :nbytes].contiguous()
            factor = 1.0 / len(rows)
            self.repack(rows, packed[:nbytes], end - begin, random.row(index), factor, error)
            if unsent is not None and error is not None:
                unsent[begin:end].add_(error, alpha=float(weight))
        return packed

    def unpack_shards(self, rows: Tensor, out: Tensor, shards: Shards, random: Randomness) -> None:
        """Decodes the rows of the second phase into ``out``, shard after shard."""
        for index, (begin, end, nbytes) in enumerate(shards):
            if begin < end:
                self.unpack(rows[index, None, :nbytes], out[begin:end], random.row(index), 1.0)
