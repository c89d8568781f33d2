"""Defines what a packed codec is given: a piece of a bucket, and random bits for its payload."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket
from commhooks.kernels import RandomBits, Segments

__all__ = ["Piece", "Randomness", "Shard", "Shards"]


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


class Shards(tuple["Shard", ...]):
    """Lists the shards of a bucket, one per rank.

    Attributes:
        segments: where blocks begin in each shard, for a codec of blocks; None for other codecs.
    """

    segments: Segments | None = None


class Shard(NamedTuple):
    """Describes the part of a bucket that one rank sums: first and last entry, payload bytes."""

    begin: int
    end: int
    nbytes: int
