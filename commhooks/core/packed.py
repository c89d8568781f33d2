"""Packed codecs: payloads of a fixed number of bytes, and the two ways to exchange them.

- **all-gather**: every rank gets every payload; one rounding, ``n - 1`` payloads received.
- **two-phase**: rank r gets everyone's payload of shard r, sums it in float32, packs the mean again
  and sends it to all; two roundings, two payloads received, however many ranks there are.

Never is a partial sum rounded again on a ring: the error would grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, SchemeExchange
from commhooks.core.scheme import Scheme
from commhooks.core.traits import ErrorKind, Exact, Traits
from commhooks.kernels import RandomBits
from ddp_core import AllGather, AllToAll, Collective

__all__ = [
    "PackedCodec",
    "Pattern",
    "Piece",
    "Randomness",
    "Shard",
    "spans",
]

Pattern = Literal["two_phase", "all_gather"]
Rounds = Generator[Collective, Tensor, None]


class Randomness:
    """Random streams of one payload, made when they are asked for.

    Attributes:
        noise: for stochastic rounding; of this rank and phase alone.
        shared: the same on every rank and in both phases.
        per_phase: the same on every rank, and another in each phase.
        bucket: for other draws, from ``bucket.generator``; of this phase.
    """

    def __init__(self, bucket: Bucket, shard: int, phase: str, purpose: str = "") -> None:
        self._whole, self._place, self._again = bucket, (shard, purpose), phase != "worker"
        self._shard, self._phase = f"{purpose}{shard}", f"{purpose}{phase}/{shard}"

    @property
    def first(self) -> Randomness:
        """What the payloads that arrive in the first phase were packed with."""
        shard, purpose = self._place
        return Randomness(self._whole, shard, "worker", purpose)

    @cached_property
    def noise(self) -> RandomBits:
        return self._whole.random(self._phase, shared=False)

    @cached_property
    def shared(self) -> RandomBits:
        return self._whole.random(self._shard, shared=True)

    @cached_property
    def per_phase(self) -> RandomBits:
        return self._whole.random(self._phase, shared=True) if self._again else self.shared

    @cached_property
    def bucket(self) -> Bucket:
        # What feedback keeps is not a codec's: it is given what to encode.
        return self._whole.with_draws(self._phase).replace(residual=None, unsent=None)


class Piece(NamedTuple):
    """A stretch of a bucket that becomes one payload.

    Attributes:
        x: float32, float16 or bfloat16, flat.
        residual: float32, as many entries: to be added to ``x``.
        unsent: float32, as many entries: takes ``x + residual`` less what the payload stands for.
    """

    x: Tensor
    residual: Tensor | None = None
    unsent: Tensor | None = None

    @classmethod
    def of(cls, bucket: Bucket) -> Piece:
        """The whole bucket."""
        return cls(bucket.raw, bucket.residual, bucket.unsent)

    @property
    def corrected(self) -> Tensor:
        """``x + residual`` in float32; may be ``x`` itself."""
        return self.x.to(torch.float32) if self.residual is None else self.x + self.residual

    def part(self, begin: int, end: int) -> Piece:
        """Some of the entries."""
        return Piece(*(None if one is None else one[begin:end] for one in self))  # type: ignore[arg-type]


class Shard(NamedTuple):
    """The part of a bucket that one rank sums, and the bytes of its payload."""

    begin: int
    end: int
    nbytes: int


class PackedCodec(Scheme):
    """A codec whose payload of n entries is a fixed number of bytes, a multiple of 16.

    Subclasses implement ``payload_bytes``, ``pack`` and ``unpack``; ``repack`` where one pass does
    better. Entries are float32 (float64 gradients are rounded; feedback gets the difference).

    Attributes:
        pattern: "two_phase" or "all_gather".
    """

    pattern: Pattern = "two_phase"

    @property
    def granularity(self) -> int:
        """Entries that cannot be divided; shards are multiples of it."""
        return 1

    @property
    def error(self) -> ErrorKind:
        """The error of the mean, see :class:`commhooks.Traits`."""
        return Exact()

    @property
    def traits(self) -> Traits:
        return Traits(rounds=2 if self.pattern == "two_phase" else 1, error=self.error)

    def payload_bytes(self, n: int) -> int:
        """Bytes of the payload of ``n`` entries."""
        raise NotImplementedError

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        """Writes the payload of a piece of the bucket, and to ``piece.unsent`` what it leaves out.

        Args:
            piece: entries, and their residual.
            payload: uint8, ``payload_bytes(piece.x.numel())`` of them.
            random: random bits of this payload.
        """
        raise NotImplementedError

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        """Writes the sum of what the rows of ``payloads`` stand for, times ``factor``."""
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
        """``unpack``, then ``pack``: the middle of the two-phase exchange."""
        total = torch.empty(n, dtype=torch.float32, device=payload.device)
        self.unpack(payloads, total, random.first, factor)
        self.pack(Piece(total, None, unsent), payload, random)

    def is_worthwhile(self, n: int, dense_bytes: int, world_size: int) -> bool:
        """Whether sending the payload of ``n`` entries, which is smaller, beats an all-reduce."""
        return True

    # ---- how payloads travel

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n, world_size = bucket.raw.numel(), bucket.world_size
        shards = self.shards(n, world_size if self.pattern == "two_phase" else 1)
        dense_bytes = bucket.raw.nbytes
        small = len(shards) * shards[0].nbytes < dense_bytes
        if not (small and self.is_worthwhile(n, dense_bytes, world_size)):
            return (yield from bucket.all_reduce())
        inside = bucket.in_float32()
        if self.pattern == "two_phase":
            yield from self._two_phase(inside, shards)
        else:
            yield from self._all_gather(inside)
        return bucket.result_of(inside)

    def shards(self, n: int, count: int) -> list[Shard]:
        """``n`` entries in ``count`` shards, equal multiples of the unit; the last may be short."""
        return self.to_shards(spans(n, count, self.granularity))

    def to_shards(self, parts: Sequence[tuple[int, int]]) -> list[Shard]:
        """Shards of these begins and ends."""
        return [Shard(begin, end, self.payload_bytes(end - begin)) for begin, end in parts]

    def _all_gather(self, bucket: Bucket) -> Rounds:
        x = bucket.raw
        payload = x.new_empty(self.payload_bytes(x.numel()), dtype=torch.uint8)
        draw = Randomness(bucket, 0, "worker")
        self.pack(Piece.of(bucket), payload, draw)
        gathered = yield AllGather(payload)
        self.unpack(gathered, bucket.output, draw, 1.0 / bucket.world_size)

    def _two_phase(self, bucket: Bucket, shards: list[Shard]) -> Rounds:
        draws = [Randomness(bucket, r, "worker") for r in range(len(shards))]
        rows = self.pack_shards(Piece.of(bucket), shards, draws)
        received = yield AllToAll(rows)
        again = self.repack_shard(
            received, shards, bucket.rank, bucket, bucket.unsent, bucket.world_size
        )
        gathered = yield AllGather(again)
        draws = [Randomness(bucket, r, "server") for r in range(len(shards))]
        self.unpack_shards(gathered, bucket.output, shards, draws)

    def pack_shards(
        self,
        piece: Piece,
        shards: list[Shard],
        draws: list[Randomness],
    ) -> Tensor:
        """A row of bytes for each shard of a piece, all of one length."""
        rows = piece.x.new_zeros(len(shards), shards[0].nbytes, dtype=torch.uint8)
        for (begin, end, nbytes), row, draw in zip(shards, rows, draws, strict=True):
            if begin < end:
                self.pack(piece.part(begin, end), row[:nbytes], draw)
        return rows

    def repack_shard(
        self,
        received: Tensor,
        shards: list[Shard],
        own: int,
        bucket: Bucket,
        unsent: Tensor | None,
        weight: int,
        purpose: str = "",
    ) -> Tensor:
        """The bytes of the mean of what came of shard ``own``.

        What that mean lost is this rank's to send, as ``weight`` times as much of its own share,
        and is added to ``unsent``.
        """
        begin, end, nbytes = shards[own]
        again = received.new_zeros(shards[0].nbytes)
        if begin < end:
            lost = None if unsent is None else torch.empty_like(unsent[begin:end])
            draw = Randomness(bucket, own, "server", purpose)
            rows = received[:, :nbytes].contiguous()
            self.repack(rows, again[:nbytes], end - begin, draw, 1.0 / len(rows), lost)
            if unsent is not None and lost is not None:
                unsent[begin:end].add_(lost, alpha=float(weight))
        return again

    def unpack_shards(
        self, rows: Tensor, out: Tensor, shards: list[Shard], draws: list[Randomness]
    ) -> None:
        """Writes what the rows of the second phase stand for, shard after shard."""
        for (begin, end, nbytes), row, draw in zip(shards, rows, draws, strict=True):
            if begin < end:
                self.unpack(row[None, :nbytes], out[begin:end], draw, 1.0)


def spans(n: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Where ``count`` equal multiples of ``unit`` cut ``n`` entries; the last may be short."""
    each = -(-n // (count * unit)) * unit
    return [(min(i * each, n), min((i + 1) * each, n)) for i in range(count)]
