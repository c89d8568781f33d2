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

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, SchemeExchange
from commhooks.core.payloads import Payloads
from commhooks.core.piece import Piece, Randomness, Shard
from commhooks.core.shards import Span
from commhooks.core.traits import ErrorKind, Exact, Traits
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


class PackedCodec(Payloads):
    """Sends payloads of n entries in a fixed number of bytes, a multiple of 16.

    Subclasses implement ``payload_bytes``, ``pack`` and ``unpack``, and ``repack`` where a single
    pass is faster. Sums are float32; a float64 gradient is rounded to float32 before it is packed,
    and feedback keeps the rounding error.

    Attributes:
        pattern: "two_phase" or "all_gather".
    """

    pattern: Pattern = "two_phase"

    @property
    def error(self) -> ErrorKind:
        """Returns the error of the mean, see :class:`commhooks.Traits`."""
        return Exact()

    @property
    def traits(self) -> Traits:
        rounds = 2 if self.pattern == "two_phase" else 1
        return Traits(rounds=rounds, error=self.error, shards=True)

    def is_worthwhile(self, n: int, dense_bytes: int, world_size: int) -> bool:
        """Whether sending payloads beats an all-reduce; asked only where payloads are smaller."""
        return True

    # ---- how payloads travel

    gathers = True

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if bucket.shards is not None:
            return (yield from self.reduce_scatter(bucket, bucket.shards))
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
            finite = yield from self._gather_whole(inside)
        return bucket.result_of(inside)._replace(finite=finite)

    def shards(self, n: int, count: int) -> Sequence[Shard]:
        """Cuts ``n`` entries into ``count`` shards, equal multiples of the granularity.

        The last shards may be short or empty.
        """
        try:
            return _shards(self, n, count, self.granularity)
        except TypeError:  # a setting that has no hash, such as a list
            return _shards.__wrapped__(self, n, count, self.granularity)

    def _gather_whole(self, bucket: Bucket) -> Generator[Collective, Tensor, Tensor | None]:
        x = bucket.raw
        payload = x.new_empty(self.payload_bytes(x.numel()), dtype=torch.uint8)
        random = Randomness(bucket, "worker")
        self.pack(Piece.of(bucket), payload, random)
        gathered = yield AllGather(payload)
        return self.unpack(gathered, bucket.output, random, 1.0 / bucket.world_size)

    def reduce_scatter(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        """Runs the first phase alone: each rank gets the mean of its shard, rounded once.

        Args:
            bucket: its ``shards`` are ``parts``, and its output has this rank's entries.
            parts: begin and end of the shard of each rank, anywhere.
        """
        shards = to_shards(self, parts)
        if len(shards) * shards[0].nbytes >= bucket.raw.nbytes:
            return (yield from bucket.all_reduce())
        inside, random = bucket.in_float32(), Randomness(bucket, "worker")
        # Kernels that take all shards at once cut at multiples of the granularity. A caller may cut
        # anywhere else: there, each shard is packed by itself.
        cut_as_kernels = shards[0].end % self.granularity == 0
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
        shards = to_shards(self, parts)
        begin, end, nbytes = shards[bucket.rank]
        if shards[0].nbytes >= shards[0].end * bucket.raw.element_size():
            return (yield from bucket.all_gather(parts))
        inside, random = bucket.in_float32(), Randomness(bucket, "server")
        payload = inside.raw.new_zeros(shards[0].nbytes, dtype=torch.uint8)
        if begin < end:
            self.pack(Piece.of(inside), payload[:nbytes], random.row(bucket.rank))
        # A shard that is shorter than the first is packed as one of its own length, which kernels
        # that take all shards at once do not expect.
        alike = shards[0].end % self.granularity == 0 and len({end - at for at, end in parts}) == 1
        unpack = self.unpack_shards if alike else partial(PackedCodec.unpack_shards, self)
        yield from _gather(payload, inside.output, shards, random, unpack)
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
        yield from _gather(packed, bucket.output, shards, server, self.unpack_shards)


def _gather(
    payload: Tensor,
    output: Tensor,
    shards: Sequence[Shard],
    random: Randomness,
    unpack: Callable[[Tensor, Tensor, Sequence[Shard], Randomness], None],
) -> Rounds:
    """Gathers the payloads of all shards and decodes them: the second phase."""
    gathered = yield AllGather(payload)
    unpack(gathered, output, shards, random)


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
