"""Defines packed codecs: payloads of a fixed number of bytes, and two patterns to exchange them.

- **all-gather**: every rank receives the payloads of all n ranks; one rounding, ``n - 1`` payloads
  received.
- **two-phase**: rank r receives all payloads of shard r, sums them in float32, packs the mean and
  sends it to all ranks; two roundings, ``2 (n - 1) / n`` payloads received.

No pattern rounds partial sums along a ring: the error would grow with the number of ranks,
see ``docs/design/foundation.md``.

The two phases are also there by themselves, with shards that the caller chooses:
:meth:`PackedCodec.reduce_scatter` and :meth:`PackedCodec.all_gather`, each with one rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._layout import Layout, Span
from commhooks.core._scheme import Scheme
from commhooks.core._traits import ErrorKind, Exact, Traits
from commhooks.kernels import RandomBits, Segments
from ddp_core import AllGather, AllToAll, Collective

__all__ = [
    "BlockCodec",
    "PackedCodec",
    "Pattern",
    "Payloads",
    "Piece",
    "Randomness",
    "Shard",
    "Shards",
    "one_segment",
    "spans",
    "to_shards",
]


class Randomness:
    """Provides the random streams of the payloads of one phase; each is made at its first use.

    Payloads of different shards have different bits: :meth:`row` selects those of one shard.

    Attributes:
        noise: for stochastic rounding; differs between ranks and phases.
        shared: the same on every rank and in both phases.
        per_phase: the same on every rank, different in each phase.
        member: rank of the sender and number of ranks, among those whose payloads are summed.
        bucket: for other draws, by ``bucket.generator``; different in each phase.

    Args:
        bucket: keys the streams, together with its step and rank.
        phase: "worker" for payloads of ranks, "server" for those of means.
        purpose: tells apart the exchanges of one bucket, as inside and between nodes.
        index: the shard that the payload is of.
        member: rank of the payload's sender and number of ranks, among those whose payloads are
            summed. None: those of the bucket in the phase "worker", and (0, 1) otherwise.
    """

    def __init__(
        self,
        bucket: Bucket,
        phase: str,
        purpose: str = "",
        index: int = 0,
        member: tuple[int, int] | None = None,
    ) -> None:
        self._bucket, self._phase, self._purpose, self._index = bucket, phase, purpose, index
        if member is None:
            member = (bucket.rank, bucket.world_size) if phase == "worker" else (0, 1)
        self.member = member

    def row(self, index: int) -> Randomness:
        """Returns the streams of one shard."""
        if index == self._index:
            return self
        return Randomness(self._bucket, self._phase, self._purpose, index, self.member)

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
        return self._bucket.fork_random(key).replace(residual=None, unsent=None)


class Piece(NamedTuple):
    """Holds a contiguous part of a bucket that becomes one payload.

    Attributes:
        x: flat, float32, float16 or bfloat16.
        residual: float32, as many entries as ``x``; to be added to ``x``. None: nothing.
        unsent: float32, as many entries as ``x``; takes ``x + residual`` minus the decoded payload.
            None: no error feedback keeps it.
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


class Shards(tuple["Shard", ...]):
    """Lists the shards of a bucket, one per rank.

    Attributes:
        segments: begins of the blocks in each shard, for a codec of blocks; None for others.
    """

    segments: Segments | None = None


class Shard(NamedTuple):
    """Describes the part of a bucket that one rank sums: first and last entry, payload bytes."""

    begin: int
    end: int
    nbytes: int


# ---- payloads of pieces and of shards


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
            Whether all of ``out`` is finite, one bool; None if that was not checked.
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


# ---- how payloads travel


Pattern = Literal["two_phase", "all_gather"]
Rounds = Generator[Collective, Tensor, None]


class PackedCodec(Payloads):
    """Sends payloads of n entries in a fixed number of bytes, a multiple of 16.

    Subclasses implement ``payload_bytes``, ``pack`` and ``unpack``, and ``repack`` where a single
    pass is faster. Sums are float32; a float64 gradient is rounded to float32 before it is packed,
    and feedback keeps the rounding error.

    Attributes:
        pattern: "two_phase" or "all_gather".
    """

    pattern: Pattern = "two_phase"
    # See :class:`commhooks.core.Traits`.
    per_parameter: ClassVar[bool] = False
    keeps_zeros: ClassVar[bool] = False

    @property
    def error(self) -> ErrorKind:
        """Returns the error of the mean, see :class:`commhooks.core.Traits`."""
        return Exact()

    @property
    def traits(self) -> Traits:
        rounds = 2 if self.pattern == "two_phase" else 1
        return Traits(
            rounds=rounds,
            error=self.error,
            shards=True,
            per_parameter=self.per_parameter,
            keeps_zeros=self.keeps_zeros,
        )

    def is_worthwhile(self, n: int, dense_bytes: int, world_size: int) -> bool:
        """Whether sending payloads beats an all-reduce; asked only where payloads are smaller."""
        return True

    # ---- how payloads travel

    gathers = True

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if bucket.shards is not None:
            return (yield from self.reduce_scatter(bucket, bucket.shards))
        n, world_size = bucket.raw.numel(), bucket.world_size
        shards = self.shards(bucket.layout, world_size if self.pattern == "two_phase" else 1)
        dense_bytes = bucket.raw.nbytes
        # Short and empty shards count as full ones: all rows of a message have the same length.
        small = len(shards) * shards[0].nbytes < dense_bytes
        if not (small and self.is_worthwhile(n, dense_bytes, world_size)):
            return (yield from bucket.all_reduce())
        inside, finite = bucket.in_float32(), None
        if self.pattern == "two_phase":
            yield from self._two_phase(inside, shards)
        else:
            finite = yield from self._gather_whole(inside, shards)
        return bucket.result_of(inside)._replace(finite=finite)

    def shards(self, layout: Layout, count: int) -> Shards:
        """Cuts a bucket into ``count`` shards of nearly equal size.

        The last shards may be short or empty. A codec of blocks cuts parameters between blocks.
        """
        try:
            return _shards(self, layout, count)
        except TypeError:  # a setting that has no hash, such as a list
            return _shards.__wrapped__(self, layout, count)

    def cut(self, layout: Layout, count: int, unit: int) -> Sequence[Span]:
        """Returns begin and end of ``count`` shards, at multiples of ``unit``.

        A codec of blocks counts them from the begin of each parameter.
        """
        if self.segments([[1]]) is None:
            return spans(layout.numel, count, unit)
        return _between_blocks(layout, count, unit)

    def shards_at(self, layout: Layout, parts: Sequence[Span]) -> Shards:
        """Returns the shards of a bucket with these begins and ends."""
        try:
            return _shards_at(self, layout, tuple(parts))
        except TypeError:  # a setting that has no hash, such as a list
            return to_shards(self, parts, layout)

    def _gather_whole(
        self, bucket: Bucket, shards: Shards
    ) -> Generator[Collective, Tensor, Tensor | None]:
        random = Randomness(bucket, "worker")
        gathered = yield AllGather(self.pack_shard(Piece.of(bucket), shards, 0, random))
        return self.unpack_shard(
            gathered, shards, 0, bucket.output, random, 1.0 / bucket.world_size
        )

    def reduce_scatter(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        """Runs the first phase alone: each rank gets the mean of its shard, rounded once.

        Args:
            bucket: its ``shards`` are ``parts``, and its output has this rank's entries.
            parts: begin and end of the shard of each rank, anywhere.
        """
        shards = self.shards_at(bucket.layout, parts)
        if len(shards) * shards[0].nbytes >= bucket.raw.nbytes:
            return (yield from bucket.all_reduce())
        inside, random = bucket.in_float32(), Randomness(bucket, "worker")
        # Kernels that take all shards at once cut at multiples of the granularity. A caller may cut
        # anywhere else: there, each shard is packed by itself.
        cut_as_kernels = shards.segments is not None or shards[0].end % self.granularity == 0
        pack = self.pack_shards if cut_as_kernels else partial(PackedCodec.pack_shards, self)
        unpack = self.unpack_shard if cut_as_kernels else partial(PackedCodec.unpack_shard, self)
        received = yield AllToAll(pack(Piece.of(inside), shards, random))
        unpack(received, shards, bucket.rank, inside.output, random, 1.0 / bucket.world_size)
        return bucket.result_of(inside)

    def all_gather(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        """Runs the second phase alone: each rank gets the shards of all ranks, rounded once.

        All ranks decode the same bytes, also the rank that packed them.

        Args:
            bucket: its gradient is this rank's shard, and its output takes all shards.
            parts: begin and end of the shard of each rank in the output.
        """
        shards = self.shards_at(bucket.layout, parts)
        if shards[0].nbytes >= shards[0].end * bucket.raw.element_size():
            return (yield from bucket.all_gather(parts))
        inside, random = bucket.in_float32(), Randomness(bucket, "server")
        payload = self.pack_shard(Piece.of(inside), shards, bucket.rank, random)
        # A shard that is shorter than the first is packed as one of its own length, which kernels
        # that take all shards at once do not expect.
        alike = shards.segments is not None or (
            shards[0].end % self.granularity == 0 and len({end - at for at, end in parts}) == 1
        )
        unpack = self.unpack_shards if alike else partial(PackedCodec.unpack_shards, self)
        yield from _gather(payload, inside.output, shards, random, unpack)
        return bucket.result_of(inside)

    def _two_phase(self, bucket: Bucket, shards: Shards) -> Rounds:
        worker, server = Randomness(bucket, "worker"), Randomness(bucket, "server")
        # Phase 1: rank r receives shard r of every rank.
        received = yield AllToAll(self.pack_shards(Piece.of(bucket), shards, worker))
        # Phase 2: every rank receives the packed mean of every shard. All ranks decode the same
        # bytes, also the rank that packed them: the mean has the same bits on every rank.
        packed = self.repack_shard(
            received, shards, bucket.rank, server, bucket.unsent, bucket.world_size
        )
        yield from _gather(packed, bucket.output, shards, server, self.unpack_shards)


def _gather(
    payload: Tensor,
    output: Tensor,
    shards: Shards,
    random: Randomness,
    unpack: Callable[[Tensor, Tensor, Shards, Randomness], None],
) -> Rounds:
    """Gathers the payloads of all shards and decodes them: the second phase."""
    gathered = yield AllGather(payload)
    unpack(gathered, output, shards, random)


@lru_cache(maxsize=4096)  # a few per bucket, in every step
def _shards(codec: PackedCodec, layout: Layout, count: int) -> Shards:
    return to_shards(codec, codec.cut(layout, count, codec.granularity), layout)


@lru_cache(maxsize=4096)
def _shards_at(codec: PackedCodec, layout: Layout, parts: tuple[Span, ...]) -> Shards:
    return to_shards(codec, parts, layout)


def to_shards(codec: PackedCodec, parts: Sequence[Span], layout: Layout | None = None) -> Shards:
    """Returns the shards with these begins and ends.

    Args:
        layout: layout of the cut tensor; None, or another layout: its parameters are not known.
    """
    known = layout is not None and layout.numel == parts[-1][1]
    cut = layout.cut(parts) if known and layout is not None else [(end - at,) for at, end in parts]
    segments = codec.segments(cut)
    if segments is None:
        # Of thousands of shards, all but one or two have the same length.
        nbytes = {n: codec.payload_bytes(n) for n in {end - begin for begin, end in parts}}
        return Shards(Shard(begin, end, nbytes[end - begin]) for begin, end in parts)
    size = codec.row_bytes(segments)
    shards = Shards(Shard(begin, end, size) for begin, end in parts)
    shards.segments = segments
    return shards


def _between_blocks(layout: Layout, count: int, unit: int) -> list[Span]:
    """Returns begin and end of ``count`` spans of nearly equal size, cut between blocks."""
    cuts, n = [0], layout.numel
    for index in range(1, count):
        ideal = n * index // count
        place = bisect_right(layout.offsets, ideal) - 1
        begin, end = layout.offsets[place : place + 2] if ideal < n else (n, n)
        cut = begin + (ideal - begin + unit // 2) // unit * unit
        cuts.append(max(cuts[-1], min(cut, end)))
    return list(pairwise([*cuts, n]))


def spans(n: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Returns begin and end of ``count`` spans of ``n`` entries, equal multiples of ``unit``.

    The last spans may be short or empty.
    """
    length = -(-n // (count * unit)) * unit
    return [(min(i * length, n), min((i + 1) * length, n)) for i in range(count)]


# ---- codecs of blocks


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
