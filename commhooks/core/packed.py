"""Defines packed codecs: payloads of a fixed number of bytes, and two patterns to exchange them.

- **all-gather**: every rank receives the payloads of all n ranks; one rounding, ``n - 1`` payloads
  received.
- **two-phase**: rank r receives all payloads of shard r, sums them in float32, packs the mean and
  sends it to all ranks; two roundings, ``2 (n - 1) / n`` payloads received.

No pattern rounds partial sums along a ring: the error would grow with the number of ranks. Figures
are in ``docs/design/schemes.md``.

The two phases are also there by themselves, with shards that the caller chooses:
:meth:`PackedCodec.reduce_scatter` and :meth:`PackedCodec.all_gather`, each with one rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import ClassVar, Literal

from torch import Tensor

from commhooks.core.bucket import Bucket, SchemeExchange
from commhooks.core.layout import Layout
from commhooks.core.payloads import Payloads
from commhooks.core.piece import Piece, Randomness, Shard, Shards
from commhooks.core.shards import Span
from commhooks.core.traits import ErrorKind, Exact, Traits
from ddp_core import AllGather, AllToAll, Collective

__all__ = [
    "PackedCodec",
    "Pattern",
    "Piece",
    "Randomness",
    "Shard",
    "Shards",
    "spans",
    "to_shards",
]

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
    # See :class:`commhooks.Traits`.
    per_parameter: ClassVar[bool] = False
    keeps_zeros: ClassVar[bool] = False

    @property
    def error(self) -> ErrorKind:
        """Returns the error of the mean, see :class:`commhooks.Traits`."""
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
        layout: of the tensor that is cut. None, or one of something else: parameters are not known.
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
