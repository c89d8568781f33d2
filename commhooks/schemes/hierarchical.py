"""Defines ``Hierarchical``: one codec between the ranks of a node, another between nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._layout import Layout
from commhooks.core._packed import PackedCodec, Piece, Randomness, Shards
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._traits import Traits, composed
from commhooks.schemes.quantized import Blockwise, Undithered
from commhooks.wrappers._averaged_feedback import AveragedFeedback
from ddp_core import AllGather, AllToAll

__all__ = ["Hierarchical", "sdp4bit"]


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """Averages inside each node by one codec, then the means of the nodes by another.

    Each rank of a node sums one part of the bucket (all-to-all inside the node). The node means of
    that part are averaged in two phases among the ranks with the same local rank in all nodes, and
    the payloads of the result are passed on inside the node without decoding. So a rank sends
    between nodes 2 (nodes - 1) / nodes of 1 / local_size of the bucket, and no entry is rounded
    more than three times. Each rounding error is added to the residual of the rank that rounded.

    Args:
        inside: codec between the ranks of a node.
        between: codec between nodes.
        local_size: number of ranks of a node, which are consecutive; by default
            ``LOCAL_WORLD_SIZE``, which torchrun sets, or 1 if that is not set. The greatest common
            divisor with the world size is used, in case nodes differ in size or the process group
            has only some of the ranks.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(Hierarchical(
        ...     inside=Blockwise("int8", 512), between=Blockwise("int4", 128, rotate=True))))

    Reference: Wang et al., ZeRO++, 2023 (all-to-all in two levels).
    """

    inside: PackedCodec
    between: PackedCodec
    local_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("inside", "between"):
            codec = getattr(self, name)
            if codec.pattern != "two_phase":
                raise ValueError(f"Hierarchical({name}=...): its pattern is 'two_phase'")
            if codec.traits.returns != "mean":
                raise ValueError(
                    f"Hierarchical({name}={type(codec).__name__}(...)): it gives something else "
                    f"than an average, of which no further average can be taken"
                )
        if self.local_size is not None and self.local_size < 1:
            raise ValueError(
                f"Hierarchical(local_size=...) is a number of ranks, 1 or more, "
                f"got {self.local_size!r}"
            )

    @property
    def traits(self) -> Traits:
        inside, between = self.inside.error, self.between.error
        most = min(codec.traits.max_bucket_numel for codec in (self.inside, self.between))
        codecs = (self.inside.traits, self.between.traits)
        return Traits(
            rounds=4,
            error=composed(inside, between, between),
            max_bucket_numel=most,
            per_parameter=all(codec.per_parameter for codec in codecs),
            keeps_zeros=all(codec.keeps_zeros for codec in codecs),
        )

    def node_size(self, world_size: int) -> int:
        """Returns the number of consecutive ranks that form a node."""
        local = self.local_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return math.gcd(local, world_size)

    def environment(self, world_size: int) -> Sequence[str]:
        return (f"ranks of a node: {self.node_size(world_size)}",)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        world_size = bucket.world_size
        local = self.node_size(world_size)
        nodes = world_size // local
        if local == 1 or nodes == 1:
            codec = self.between if local == 1 else self.inside  # one level alone
            return (yield from codec.exchange(bucket))
        node, local_rank = divmod(bucket.rank, local)
        mates = range(node * local, (node + 1) * local)
        partners = range(local_rank, world_size, local)

        parts, cuts = _cut(self, bucket.layout, local, nodes)
        width = max(cut[0].nbytes for cut in cuts)
        if world_size * width >= bucket.raw.nbytes:
            return (yield from bucket.all_reduce())
        inner = bucket.in_float32()

        # Inside: this rank receives its part of the bucket from all ranks of the node.
        random = Randomness(inner, "worker", "inside/", member=(local_rank, local))
        received = yield AllToAll(self.inside.pack_shards(Piece.of(inner), parts, random), mates)
        begin, end, _ = parts[local_rank]
        mean = torch.empty(end - begin, dtype=torch.float32, device=inner.raw.device)
        self.inside.unpack_shard(received, parts, local_rank, mean, random, 1.0 / local)

        # Between: the node means of that part, in two phases.
        purpose = f"between/{local_rank}/"
        worker = Randomness(inner, "worker", purpose, member=(node, nodes))
        server = Randomness(inner, "server", purpose)
        error = None if inner.unsent is None else torch.zeros_like(mean)
        rows = self.between.pack_shards(Piece(mean, None, error), cuts[local_rank], worker)
        received = yield AllToAll(_padded(rows, width), partners)
        # A node mean is of ``local`` ranks: an entry of one rank's residual weighs 1 / local in it.
        if error is not None:
            error.mul_(float(local))
        received = received[:, : cuts[local_rank][0].nbytes].contiguous()
        packed = self.between.repack_shard(
            received, cuts[local_rank], node, server, error, world_size
        )
        gathered = yield AllGather(_padded(packed, width), partners)
        if inner.unsent is not None and error is not None:
            inner.unsent[begin:end] += error

        # Inside: the packed means of all parts, as they came. All ranks decode the same bytes.
        everything = yield AllGather(gathered, mates)
        for index, (part, cut, payloads) in enumerate(zip(parts, cuts, everything, strict=True)):
            random = Randomness(inner, "server", f"between/{index}/")
            rows = payloads[:, : cut[0].nbytes].contiguous()
            self.between.unpack_shards(rows, inner.output[part.begin : part.end], cut, random)
        return bucket.result_of(inner)


@lru_cache(maxsize=4096)  # a few per bucket, in every step
def _cut(
    scheme: Hierarchical, layout: Layout, local: int, nodes: int
) -> tuple[Shards, list[Shards]]:
    """Returns the parts of a bucket that the ranks of a node sum, and the shards of each part."""
    # Parts are cut at multiples of both units, as both codecs pack them.
    unit = math.lcm(scheme.inside.granularity, scheme.between.granularity)
    at = scheme.inside.cut(layout, local, unit)
    parts = scheme.inside.shards_at(layout, at)
    layouts = [Layout([""] * len(sizes), [(n,) for n in sizes]) for sizes in layout.cut(at)]
    return parts, [scheme.between.shards(part, nodes) for part in layouts]


def _padded(rows: Tensor, width: int) -> Tensor:
    """Pads rows to ``width`` bytes; the last part of a bucket may have shorter rows."""
    padding = width - rows.shape[-1]
    return rows if not padding else torch.nn.functional.pad(rows, (0, padding))


@register_scheme("sdp4bit")
def sdp4bit(
    *,
    local_size: int | None = None,
    inside_block: int = 512,
    between_block: int = 128,
    rounding: Undithered = "nearest",
    memory: bool = True,
) -> Scheme:
    """Sends 8-bit integers inside a node, and 4-bit integers of rotated blocks between nodes.

    Args:
        local_size: number of ranks of a node, see :class:`Hierarchical`.
        inside_block, between_block: entries per scale; between nodes also entries per rotation.
        rounding: "nearest", or "stochastic", up or down at random, unbiased.
        memory: an average of rounding errors is kept, in 8 bits (:class:`AveragedFeedback`).

    References: Jia et al., SDP4Bit, 2024; Xie et al., LoCo, 2024 (the memory).
    """
    scheme = Hierarchical(
        inside=Blockwise("int8", inside_block, rounding),
        between=Blockwise("int4", between_block, rounding, rotate=True),
        local_size=local_size,
    )
    return AveragedFeedback(scheme) if memory else scheme
