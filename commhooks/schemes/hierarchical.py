"""``Hierarchical``: one codec between the ranks of a node, another between nodes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, SchemeExchange
from commhooks.core.packed import PackedCodec, Piece, Randomness, spans
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Scheme
from commhooks.core.traits import Traits, composed
from commhooks.schemes.quantized import Blockwise
from commhooks.wrappers.averaged_feedback import AveragedFeedback
from ddp_core import AllGather, AllToAll

__all__ = ["Hierarchical", "sdp4bit"]


@dataclass(frozen=True)
class Hierarchical(Scheme):
    """Averages inside each node by one codec, then the nodes' means by another.

    Each rank of a node sums one part of the bucket (all-to-all inside the node). That part's node
    means are averaged in two phases among the ranks of the same place in all nodes, and the
    payloads that come back are handed on inside the node as they are. So a rank sends between nodes
    2 (nodes - 1) / nodes of 1 / local_size of the bucket, and nothing is rounded more than three
    times. What a rounding loses goes to the residual of the rank that rounded.

    Args:
        inside: between ranks of a node.
        between: between nodes.
        local_size: ranks of a node, which are consecutive; by default what torchrun says
            (``LOCAL_WORLD_SIZE``), and 1 where it says nothing. Where nodes differ in size, or
            the process group has only some of the ranks: consecutive ones of the greatest common
            divisor with the world size are taken as a node.

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
        if self.local_size is not None and self.local_size < 1:
            raise ValueError(
                f"Hierarchical(local_size=...) is a number of ranks, 1 or more, "
                f"got {self.local_size!r}"
            )

    @property
    def traits(self) -> Traits:
        inside, between = self.inside.error, self.between.error
        return Traits(rounds=4, error=composed(inside, between, between))

    def node_size(self, world_size: int) -> int:
        """Ranks that are taken as a node."""
        local = self.local_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return math.gcd(local, world_size)

    def environment(self, world_size: int) -> Sequence[str]:
        return (f"ranks of a node: {self.node_size(world_size)}",)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        world_size, n = bucket.world_size, bucket.raw.numel()
        local = self.node_size(world_size)
        nodes = world_size // local
        if local == 1 or nodes == 1:
            codec = self.between if local == 1 else self.inside
            return (yield from codec.exchange(bucket))
        node, place = divmod(bucket.rank, local)
        mates = range(node * local, (node + 1) * local)
        partners = range(place, world_size, local)

        unit = math.lcm(self.inside.granularity, self.between.granularity)
        parts = self.inside.to_shards(spans(n, local, unit))
        cuts = [self.between.shards(one.end - one.begin, nodes) for one in parts]
        width = cuts[0][0].nbytes
        if world_size * width >= bucket.raw.nbytes:
            return (yield from bucket.all_reduce())
        inner = bucket.in_float32()

        # Inside: this rank gets its part of the bucket from all ranks of the node.
        draws = [Randomness(inner, at, "worker", "inside/") for at in range(local)]
        rows = self.inside.pack_shards(Piece.of(inner), parts, draws)
        received = yield AllToAll(rows, mates)
        begin, end, nbytes = parts[place]
        mean = torch.empty(end - begin, dtype=torch.float32, device=inner.raw.device)
        if begin < end:
            rows = received[:, :nbytes].contiguous()
            self.inside.unpack(rows, mean, draws[place], 1.0 / local)

        # Between: that part's node means, in two phases.
        draws = [Randomness(inner, at, "worker", f"between/{place}/") for at in range(nodes)]
        lost = None if inner.unsent is None else torch.zeros_like(mean)
        rows = self.between.pack_shards(Piece(mean, None, lost), cuts[place], draws)
        received = yield AllToAll(_padded(rows, width), partners)
        if lost is not None:
            lost.mul_(float(local))
        again = self.between.repack_shard(
            *(received, cuts[place], node, inner, lost, world_size, f"between/{place}/")
        )
        gathered = yield AllGather(_padded(again, width), partners)
        if inner.unsent is not None and lost is not None:
            inner.unsent[begin:end] += lost

        # Inside: what came back, byte by byte.
        everything = yield AllGather(gathered, mates)
        for at, (part, cut, payloads) in enumerate(zip(parts, cuts, everything, strict=True)):
            draws = [Randomness(inner, i, "server", f"between/{at}/") for i in range(nodes)]
            self.between.unpack_shards(payloads, inner.output[part.begin : part.end], cut, draws)
        return bucket.result_of(inner)


def _padded(rows: Tensor, width: int) -> Tensor:
    """Rows of ``width`` bytes: a short last part's are as long as all others' then."""
    missing = width - rows.shape[-1]
    return rows if not missing else torch.nn.functional.pad(rows, (0, missing))


@register_scheme("sdp4bit")
def sdp4bit(
    *,
    local_size: int | None = None,
    inside_block: int = 512,
    between_block: int = 128,
    stochastic: bool = False,
    memory: bool = True,
) -> Scheme:
    """8-bit integers inside a node, 4-bit ones of rotated blocks between nodes.

    Args:
        local_size: ranks of a node; by default what torchrun says, see :class:`Hierarchical`.
        inside_block, between_block: entries per scale; the latter also of the rotation.
        stochastic: unbiased instead of near.
        memory: keeps an average of what was lost, in 8 bits (:class:`AveragedFeedback`).

    References: Jia et al., SDP4Bit, 2024; Xie et al., LoCo, 2024 (the memory).
    """
    scheme = Hierarchical(
        inside=Blockwise("int8", inside_block, stochastic),
        between=Blockwise("int4", between_block, stochastic, rotate=True),
        local_size=local_size,
    )
    return AveragedFeedback(scheme) if memory else scheme
