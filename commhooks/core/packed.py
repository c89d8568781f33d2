"""Defines packed codecs: payloads of a fixed number of bytes, and two patterns to exchange them.

- **all-gather**: every rank receives the payloads of all n ranks; one rounding, ``n - 1`` payloads
  received.
- **two-phase**: rank r receives all payloads of shard r, sums them in float32, packs the mean and
  sends it to all ranks; two roundings, ``2 (n - 1) / n`` payloads received.

No pattern rounds partial sums along a ring: the error would grow with the number of ranks. Figures
are in ``docs/design/schemes.md``.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, SchemeExchange
from commhooks.core.scheme import Scheme
from commhooks.core.shards import Span
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
    "to_shards",
]

Pattern = Literal["two_phase", "all_gather"]
Rounds = Generator[Collective, Tensor, None]


class Randomness:
    """Provides the random streams of the payloads of one phase; each is made at its first use.

    Payloads of different shards have different bits: :meth:`row` selects those of one shard.

    Attributes:
        noise: for stochastic rounding; differs between ranks and phases.
        shared: the same on every rank and in both phases.
        per_phase: the same on every rank, different in each phase.
        bucket: for other draws, by ``bucket.generator``; different in each phase.

    Args:
        bucket: keys the streams, together with its step and rank.
        phase: "worker" for payloads of ranks, "server" for those of means.
        purpose: tells apart the exchanges of one bucket, as inside and between nodes.
        index: the shard that the payload is of.
    """

    def __init__(self, bucket: Bucket, phase: str, purpose: str = "", index: int = 0) -> None:
        self._bucket, self._phase, self._purpose, self._index = bucket, phase, purpose, index

    def row(self, index: int) -> Randomness:
        """Returns the streams of one shard."""
        return Randomness(self._bucket, self._phase, self._purpose, index)

    @property
    def first(self) -> Randomness:
        """Returns the streams by which payloads of the first phase were packed."""
        return Randomness(self._bucket, "worker", self._purpose, self._index)

    @cached_property
    def noise(self) -> RandomBits:
        # Not shared: rounding errors of different ranks have to be independent to average out.
        return self._bits(f"{self._phase}/0", shared=False)

    @cached_property
    def shared(self) -> RandomBits:
        return self._bits("0", shared=True)

    @cached_property
    def per_phase(self) -> RandomBits:
        return self.shared if self._phase == "worker" else self._bits("server/0", shared=True)

    def _bits(self, key: str, *, shared: bool) -> RandomBits:
        bits = self._bucket.random(self._purpose + key, shared=shared)
        return bits.row(self._index) if self._index else bits

    @cached_property
    def bucket(self) -> Bucket:
        # A codec encodes what its ``Piece`` holds: a residual in the bucket would count twice.
        key = f"{self._purpose}{self._phase}/{self._index}"
        return self._bucket.with_draws(key).replace(residual=None, unsent=None)


class Piece(NamedTuple):
    """Holds a contiguous part of a bucket that becomes one payload.

    Attributes:
        x: flat, float32, float16 or bfloat16.
        residual: float32, as many entries as ``x``; to be added to ``x``. None: nothing.
        unsent: float32, as many entries as ``x``; takes ``x + residual`` minus the decoded payload.
            None: nobody keeps it.
    """

    x: Tensor
    residual: Tensor | None = None
    unsent: Tensor | None = None

    @classmethod
    def of(cls, bucket: Bucket) -> Piece:
        """Returns the whole bucket as one piece."""
        return cls(bucket.raw, bucket.residual, bucket.unsent)

    @property
    def corrected(self) -> Tensor:
        """Returns ``x + residual`` in float32; may be ``x`` itself."""
        return self.x.to(torch.float32) if self.residual is None else self.x + self.residual

    def part(self, begin: int, end: int) -> Piece:
        """Returns the entries from ``begin`` to ``end``; views."""
        parts = [None if tensor is None else tensor[begin:end] for tensor in self]
        return Piece(*parts)  # type: ignore[arg-type]


class Shard(NamedTuple):
    """Describes the part of a bucket that one rank sums: first and last entry, payload bytes."""

    begin: int
    end: int
    nbytes: int


class PackedCodec(Scheme):
    """Sends payloads of n entries in a fixed number of bytes, a multiple of 16.

    Subclasses implement ``payload_bytes``, ``pack`` and ``unpack``, and ``repack`` where a single
    pass is faster. Sums are float32; a float64 gradient is rounded to float32 before it is packed,
    and feedback keeps the rounding error.

    Attributes:
        pattern: "two_phase" or "all_gather".
    """

    pattern: Pattern = "two_phase"

    @property
    def granularity(self) -> int:
        """Returns the entries that are encoded together: shards are multiples of them."""
        return 1

    @property
    def error(self) -> ErrorKind:
        """Returns the error of the mean, see :class:`commhooks.Traits`."""
        return Exact()

    @property
    def traits(self) -> Traits:
        rounds = 2 if self.pattern == "two_phase" else 1
        return Traits(rounds=rounds, error=self.error, shards=True)

    def payload_bytes(self, n: int) -> int:
        """Returns the number of bytes of the payload of ``n`` entries."""
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

    def is_worthwhile(self, n: int, dense_bytes: int, world_size: int) -> bool:
        """Whether sending payloads beats an all-reduce; asked only where payloads are smaller."""
        return True

    # ---- how payloads travel

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if bucket.shards is not None:
            return (yield from self._reduce_scatter(bucket, bucket.shards))
        n, world_size = bucket.raw.numel(), bucket.world_size
        shards = self.shards(n, world_size if self.pattern == "two_phase" else 1)
        dense_bytes = bucket.raw.nbytes
        # Short and empty shards count as full ones: all rows of a message have the same length.
        small = len(shards) * shards[0].nbytes < dense_bytes
        if not (small and self.is_worthwhile(n, dense_bytes, world_size)):
            return (yield from bucket.all_reduce())
        inside, finite = bucket.in_float32(), None
        if self.pattern == "two_phase":
            yield from self._two_phase(inside, shards)
        else:
            finite = yield from self._all_gather(inside)
        return bucket.result_of(inside)._replace(finite=finite)

    def shards(self, n: int, count: int) -> Sequence[Shard]:
        """Cuts ``n`` entries into ``count`` shards, equal multiples of the granularity.

        The last shards may be short or empty.
        """
        try:
            return _shards(self, n, count, self.granularity)
        except TypeError:  # a setting that has no hash, such as a list
            return _shards.__wrapped__(self, n, count, self.granularity)

    def _all_gather(self, bucket: Bucket) -> Generator[Collective, Tensor, Tensor | None]:
        x = bucket.raw
        payload = x.new_empty(self.payload_bytes(x.numel()), dtype=torch.uint8)
        random = Randomness(bucket, "worker")
        self.pack(Piece.of(bucket), payload, random)
        gathered = yield AllGather(payload)
        return self.unpack(gathered, bucket.output, random, 1.0 / bucket.world_size)

    def _reduce_scatter(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        """Runs the first phase alone: each rank gets the mean of its shard, rounded once."""
        shards = to_shards(self, parts)
        if len(shards) * shards[0].nbytes >= bucket.raw.nbytes:
            return (yield from bucket.all_reduce())
        inside, random = bucket.in_float32(), Randomness(bucket, "worker")
        # Kernels that take all shards at once cut at multiples of the granularity. A host may cut
        # anywhere else: there, each shard is packed by itself.
        cut_as_kernels = shards[0].end % self.granularity == 0
        pack = self.pack_shards if cut_as_kernels else partial(PackedCodec.pack_shards, self)
        unpack = self.unpack_shard if cut_as_kernels else partial(PackedCodec.unpack_shard, self)
        received = yield AllToAll(pack(Piece.of(inside), shards, random))
        unpack(received, shards, bucket.rank, inside.output, random, 1.0 / bucket.world_size)
        return bucket.result_of(inside)

    def _two_phase(self, bucket: Bucket, shards: Sequence[Shard]) -> Rounds:
        worker, server = Randomness(bucket, "worker"), Randomness(bucket, "server")
        # Phase 1: rank r receives shard r of every rank.
        received = yield AllToAll(self.pack_shards(Piece.of(bucket), shards, worker))
        # Phase 2: every rank receives the packed mean of every shard. All ranks decode the same
        # bytes, also the rank that packed them: the mean has the same bits on every rank.
        packed = self.repack_shard(
            received, shards, bucket.rank, server, bucket.unsent, bucket.world_size
        )
        gathered = yield AllGather(packed)
        self.unpack_shards(gathered, bucket.output, shards, server)

    # The four methods below work shard by shard. A codec whose kernels take all shards at once
    # overrides them: on a GPU a launch per shard costs more host time than the line is busy
    # (docs/design/kernels.md).

    def pack_shards(self, piece: Piece, shards: Sequence[Shard], random: Randomness) -> Tensor:
        """Packs each shard of a piece into a row of bytes; all rows have the same length."""
        # Zeros: the end of a short shard's row travels, too, and is to be the same in every run.
        rows = piece.x.new_zeros(len(shards), shards[0].nbytes, dtype=torch.uint8)
        for index, (begin, end, nbytes) in enumerate(shards):
            if begin < end:
                self.pack(piece.part(begin, end), rows[index, :nbytes], random.row(index))
        return rows

    def unpack_shard(
        self,
        received: Tensor,
        shards: Sequence[Shard],
        index: int,
        out: Tensor,
        random: Randomness,
        factor: float,
    ) -> None:
        """Writes the sum of the payloads of one shard, times ``factor``, to ``out``."""
        begin, end, nbytes = shards[index]
        if begin < end:
            self.unpack(received[:, :nbytes].contiguous(), out, random.row(index), factor)

    def repack_shard(
        self,
        received: Tensor,
        shards: Sequence[Shard],
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

    def unpack_shards(
        self, rows: Tensor, out: Tensor, shards: Sequence[Shard], random: Randomness
    ) -> None:
        """Decodes the rows of the second phase into ``out``, shard after shard."""
        for index, (begin, end, nbytes) in enumerate(shards):
            if begin < end:
                self.unpack(rows[index, None, :nbytes], out[begin:end], random.row(index), 1.0)


@lru_cache(maxsize=4096)  # a few per bucket, in every step
def _shards(codec: PackedCodec, n: int, count: int, unit: int) -> Sequence[Shard]:
    return to_shards(codec, spans(n, count, unit))


def to_shards(codec: PackedCodec, parts: Sequence[tuple[int, int]]) -> Sequence[Shard]:
    """Returns the shards with these begins and ends."""
    # Of thousands of shards, all but one or two have the same length.
    nbytes = {
        length: codec.payload_bytes(length) for length in {end - begin for begin, end in parts}
    }
    return tuple(Shard(begin, end, nbytes[end - begin]) for begin, end in parts)


def spans(n: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Returns begin and end of ``count`` spans of ``n`` entries, equal multiples of ``unit``.

    The last spans may be short or empty.
    """
    length = -(-n // (count * unit)) * unit
    return [(min(i * length, n), min((i + 1) * length, n)) for i in range(count)]
