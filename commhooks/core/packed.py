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
from commhooks.kernels import Stream
from ddp_core import AllGather, AllToAll, Collective

__all__ = [
    "Draw",
    "PackedCodec",
    "Pattern",
    "Shard",
    "spans",
]

Pattern = Literal["two_phase", "all_gather"]
Rounds = Generator[Collective, Tensor, None]


class Draw:
    """Random streams of one payload, made when they are asked for.

    Attributes:
        noise: for stochastic rounding; of this rank and phase alone.
        shared: the same on every rank and in both phases.
        anew: the same on every rank, and another in each phase.
        bucket: for other draws, from ``bucket.generator``; of this phase.
    """

    def __init__(self, bucket: Bucket, shard: int, phase: str, purpose: str = "") -> None:
        self._whole, self._place, self._again = bucket, (shard, purpose), phase != "worker"
        self._shard, self._phase = f"{purpose}{shard}", f"{purpose}{phase}/{shard}"

    @property
    def first(self) -> Draw:
        """What the payloads that arrive in the first phase were packed with."""
        shard, purpose = self._place
        return Draw(self._whole, shard, "worker", purpose)

    @cached_property
    def noise(self) -> Stream:
        return self._whole.random(self._phase, shared=False)

    @cached_property
    def shared(self) -> Stream:
        return self._whole.random(self._shard, shared=True)

    @cached_property
    def anew(self) -> Stream:
        return self._whole.random(self._phase, shared=True) if self._again else self.shared

    @cached_property
    def bucket(self) -> Bucket:
        # What feedback keeps is not a codec's: it is given what to encode.
        return self._whole.with_draws(self._phase).replace(residual=None, unsent=None)


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
    def unit(self) -> int:
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

    def pack(
        self,
        x: Tensor,
        payload: Tensor,
        draw: Draw,
        residual: Tensor | None = None,
        left: Tensor | None = None,
    ) -> None:
        """Writes the payload of ``x``, or of ``x + residual``, and to ``left`` what it leaves out.

        Args:
            x: float32, float16 or bfloat16, flat.
            payload: uint8, ``payload_bytes(x.numel())`` of them.
            residual, left: float32, as many entries as ``x``.
        """
        raise NotImplementedError

    def unpack(self, payloads: Tensor, out: Tensor, draw: Draw, factor: float) -> None:
        """Writes the sum of what the rows of ``payloads`` stand for, times ``factor``."""
        raise NotImplementedError

    def repack(
        self,
        payloads: Tensor,
        payload: Tensor,
        n: int,
        draw: Draw,
        factor: float,
        left: Tensor | None = None,
    ) -> None:
        """``unpack``, then ``pack``: the middle of the two-phase exchange."""
        total = torch.empty(n, dtype=torch.float32, device=payload.device)
        self.unpack(payloads, total, draw.first, factor)
        self.pack(total, payload, draw, left=left)

    def pays(self, n: int, dense_bytes: int, world_size: int) -> bool:
        """Whether a smaller payload of ``n`` entries is worth to be sent, not an all-reduce."""
        return True

    # ---- how payloads travel

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n, world_size = bucket.raw.numel(), bucket.world_size
        shards = self.shards(n, world_size if self.pattern == "two_phase" else 1)
        dense_bytes = bucket.raw.nbytes
        small = len(shards) * shards[0].nbytes < dense_bytes
        if not (small and self.pays(n, dense_bytes, world_size)):
            return (yield from bucket.all_reduce())
        inside = bucket.in_float32()
        if self.pattern == "two_phase":
            yield from self._two_phase(inside, shards)
        else:
            yield from self._all_gather(inside)
        return bucket.result_of(inside)

    def shards(self, n: int, count: int) -> list[Shard]:
        """``n`` entries in ``count`` shards, equal multiples of the unit; the last may be short."""
        return self.cut(spans(n, count, self.unit))

    def cut(self, parts: Sequence[tuple[int, int]]) -> list[Shard]:
        """Shards of these begins and ends."""
        return [Shard(begin, end, self.payload_bytes(end - begin)) for begin, end in parts]

    def _all_gather(self, bucket: Bucket) -> Rounds:
        x = bucket.raw
        payload = x.new_empty(self.payload_bytes(x.numel()), dtype=torch.uint8)
        draw = Draw(bucket, 0, "worker")
        self.pack(x, payload, draw, bucket.residual, bucket.unsent)
        gathered = yield AllGather(payload)
        self.unpack(gathered, bucket.output, draw, 1.0 / bucket.world_size)

    def _two_phase(self, bucket: Bucket, shards: list[Shard]) -> Rounds:
        draws = [Draw(bucket, r, "worker") for r in range(len(shards))]
        rows = self.pack_shards(bucket.raw, shards, draws, bucket.residual, bucket.unsent)
        received = yield AllToAll(rows)
        again = self.repack_shard(
            received, shards, bucket.rank, bucket, bucket.unsent, bucket.world_size
        )
        gathered = yield AllGather(again)
        draws = [Draw(bucket, r, "server") for r in range(len(shards))]
        self.unpack_shards(gathered, bucket.output, shards, draws)

    def pack_shards(
        self,
        x: Tensor,
        shards: list[Shard],
        draws: list[Draw],
        residual: Tensor | None,
        left: Tensor | None,
    ) -> Tensor:
        """A row of bytes for each shard of ``x + residual``, all of one length."""
        rows = x.new_zeros(len(shards), shards[0].nbytes, dtype=torch.uint8)
        for (begin, end, nbytes), row, draw in zip(shards, rows, draws, strict=True):
            part = slice(begin, end)
            rest, into = (None if one is None else one[part] for one in (residual, left))
            if begin < end:
                self.pack(x[part], row[:nbytes], draw, rest, into)
        return rows

    def repack_shard(
        self,
        received: Tensor,
        shards: list[Shard],
        own: int,
        bucket: Bucket,
        left: Tensor | None,
        weight: int,
        purpose: str = "",
    ) -> Tensor:
        """The bytes of the mean of what came of shard ``own``.

        What that mean lost is this rank's to send, as ``weight`` times as much of its own share,
        and is added to ``left``.
        """
        begin, end, nbytes = shards[own]
        again = received.new_zeros(shards[0].nbytes)
        if begin < end:
            lost = None if left is None else torch.empty_like(left[begin:end])
            draw = Draw(bucket, own, "server", purpose)
            rows = received[:, :nbytes].contiguous()
            self.repack(rows, again[:nbytes], end - begin, draw, 1.0 / len(rows), lost)
            if left is not None and lost is not None:
                left[begin:end].add_(lost, alpha=float(weight))
        return again

    def unpack_shards(
        self, rows: Tensor, out: Tensor, shards: list[Shard], draws: list[Draw]
    ) -> None:
        """Writes what the rows of the second phase stand for, shard after shard."""
        for (begin, end, nbytes), row, draw in zip(shards, rows, draws, strict=True):
            if begin < end:
                self.unpack(row[None, :nbytes], out[begin:end], draw, 1.0)


def spans(n: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Where ``count`` equal multiples of ``unit`` cut ``n`` entries; the last may be short."""
    each = -(-n // (count * unit)) * unit
    return [(min(i * each, n), min((i + 1) * each, n)) for i in range(count)]
