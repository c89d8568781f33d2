"""Computes how long a collective takes on a fabric, by the algorithm that the library chooses.

Times are in seconds. Sizes are the bytes that one rank passes to the collective; all functions take
arrays of sizes.

| collective | Gloo | MPI | NCCL |
|---|---|---|---|
| all_reduce | ring in segments | ring, recursive doubling | ring, double tree (NVLS inside nodes) |
| all_gather | ring | ring, recursive doubling | ring, recursive doubling (PAT) |
| all_to_all | pairwise | pairwise | pairwise |

References: Thakur et al., Optimization of collective communication operations in MPICH, 2005 (ring,
recursive doubling, pairwise); Sanders et al., Two-tree algorithms, 2009; NCCL's source, version
2.22 (``src/graph/tuning.cc``); Gloo's source (``gloo/allreduce.cc``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commhooks.predict._fabric import Fabric, Link

__all__ = ["collective_seconds", "shared_seconds"]

Seconds = NDArray[np.float64]
_SEGMENT_NBYTES = 2**20  # of Gloo's all-reduce, at most


class _Ranks(NamedTuple):
    """Describes the ranks that take part, by nodes and ranks per node.

    ``groups`` is how many such groups are busy at once, and share a node's network cards.
    """

    nodes: int
    per_node: int
    groups: int

    @property
    def size(self) -> int:
        return self.nodes * self.per_node


_Algorithm = Callable[[Seconds, _Ranks, Fabric], Seconds]


def collective_seconds(
    collective: str,
    nbytes: ArrayLike,
    *,
    ranks: int,
    fabric: Fabric,
    part: Sequence[int] | None = None,
    alone: bool = False,
) -> Seconds:
    """Returns the time of a collective.

    Args:
        collective: "all_reduce", "all_gather" or "all_to_all".
        nbytes: bytes that each rank passes to the collective, any shape.
        ranks: all ranks of the job.
        fabric: the links.
        part: the ranks that take part, of ``range(ranks)``; all by default.
        alone: whether the other ranks are idle. By default they are in groups of the same kind,
            which share the links between nodes, as in a hierarchical exchange.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    on_node = min(fabric.ranks_per_node, ranks)
    if part is None:
        members = _Ranks(math.ceil(ranks / on_node), on_node, 1)
    else:
        nodes = len({rank // on_node for rank in part})
        per_node = math.ceil(len(part) / nodes)
        members = _Ranks(nodes, per_node, 1 if alone else max(1, on_node // per_node))
    if members.size <= 1:
        return np.zeros_like(sizes)
    algorithms = _ALGORITHMS[fabric.library, collective]
    times = [algorithm(sizes, members, fabric) for algorithm in algorithms]
    if _double_tree in algorithms and fabric.tree_nbytes is not None and members.nodes > 1:
        ring, tree = times
        return np.where(sizes <= fabric.tree_nbytes, tree, ring)
    fastest: Seconds = np.minimum.reduce(times)
    return fastest


def shared_seconds(
    collective: str,
    nbytes: ArrayLike,
    *,
    ranks: int,
    fabric: Fabric,
    part: Sequence[int] | None = None,
) -> Seconds:
    """Returns the latency of a collective that messages of other buckets can share.

    During the rest of the collective the links carry nothing else.

    Args:
        collective, nbytes, ranks, fabric, part: see :func:`collective_seconds`.
    """
    if not fabric.overlap:
        return np.zeros(np.shape(nbytes))
    unshared = _without_overlap(fabric)
    whole, busy = (
        collective_seconds(collective, nbytes, ranks=ranks, fabric=links, part=part)
        for links in (fabric, unshared)
    )
    return whole - busy


@cache
def _without_overlap(fabric: Fabric) -> Fabric:
    """Returns the fabric without the latency that messages share."""

    def without_shared_latency(link: Link) -> Link:
        return replace(link, latency=(1 - fabric.overlap) * link.latency)

    inside = None if fabric.inside is None else without_shared_latency(fabric.inside)
    return replace(
        fabric, between=without_shared_latency(fabric.between), inside=inside, overlap=0.0
    )


def _ring(sizes: Seconds, members: _Ranks, fabric: Fabric, *, share: float, turns: int) -> Seconds:
    """Returns the time of ``turns`` rounds through a ring of all ranks.

    The ring enters and leaves each node once, so that a node's network cards carry what one rank
    sends; with several cards there are as many rings, each with a part of the data.

    Args:
        sizes, members, fabric: as above.
        share: part of its bytes that a rank sends to its neighbour in a step.
        turns: rounds of ``members.size - 1`` steps.
    """
    outside = members.nodes / members.size if members.nodes > 1 else 0.0  # share of all hops
    latency, slowest = 0.0, np.zeros_like(sizes)
    if members.per_node > 1:
        inside = _inside(fabric)
        latency += (1 - outside) * inside.latency
        slowest = sizes * share / inside.bandwidth
    if members.nodes > 1:
        latency += outside * fabric.between.latency
        slowest = np.maximum(slowest, sizes * share * members.groups / fabric.between.bandwidth)
    return turns * (members.size - 1) * (latency + slowest)


def _ring_all_reduce(sizes: Seconds, members: _Ranks, fabric: Fabric) -> Seconds:
    return _ring(sizes, members, fabric, share=1 / members.size, turns=2)


def _gloo_all_reduce(sizes: Seconds, members: _Ranks, fabric: Fabric) -> Seconds:
    """Returns the time of Gloo's ring, which sends each part of the data in segments.

    A rank has two segments under way. On a long line it waits for their arrival before it sends
    the next two, although the line is free.
    """
    time = _ring_all_reduce(sizes, members, fabric)
    if not fabric.overlap:
        return time
    link = fabric.between if members.nodes > 1 else _inside(fabric)
    busy = members.groups if members.nodes > 1 else 1
    waits = fabric.overlap * link.latency - _SEGMENT_NBYTES * busy / link.bandwidth
    pairs = np.ceil(sizes / members.size / (2 * _SEGMENT_NBYTES))
    steps = 2 * (members.size - 1)
    waiting: Seconds = steps * np.maximum(pairs - 1, 0) * max(waits, 0.0)
    return time + waiting


def _ring_all_gather(sizes: Seconds, members: _Ranks, fabric: Fabric) -> Seconds:
    return _ring(sizes, members, fabric, share=1.0, turns=1)


def _double_tree(sizes: Seconds, members: _Ranks, fabric: Fabric) -> Seconds:
    """Returns the time of NCCL's all-reduce by two trees of nodes, each for half of the data.

    A node is an inner node of one tree (two children and a parent: it sends half of the data three
    times) and a leaf of the other (it sends half of the data once): twice the data in all. Data
    travel in chunks, each of which costs ``chunk_s`` at every level. With chunks of the best size
    that adds twice the root of all levels' ``chunk_s`` times the time of the bytes.
    """
    time, depth = np.zeros_like(sizes), 0.0
    chunk_s, slowest = 0.0, np.zeros_like(sizes)
    if members.per_node > 1:
        inside = _inside(fabric)
        if fabric.multicast is None:  # a chain through the node, up and down
            depth += 2 * (members.per_node - 1)
            time += 2 * (members.per_node - 1) * inside.latency
            slowest = 2 * sizes / inside.bandwidth
        else:  # NVLS: the switch sums
            time += 2 * inside.latency
            slowest = sizes / fabric.multicast
    if members.nodes > 1:
        levels = 2 * math.log2(members.nodes)
        depth += levels
        time += levels * fabric.between.latency
        chunk_s = fabric.between.chunk_s
        sent = {2: 1.0, 3: 1.5}.get(members.nodes, 2.0)
        slowest = np.maximum(slowest, sent * sizes * members.groups / fabric.between.bandwidth)
    chunks: Seconds = 2 * np.sqrt(depth * chunk_s * slowest)
    return time + slowest + chunks


def _doubling_all_reduce(sizes: Seconds, members: _Ranks, fabric: Fabric) -> Seconds:
    """Returns the time of recursive doubling: all bytes, log2 of the ranks times."""
    return _doubling(sizes, members, fabric, sent=math.log2(members.size))


def _doubling_all_gather(sizes: Seconds, members: _Ranks, fabric: Fabric) -> Seconds:
    """Returns the time of recursive doubling, whose messages double with each step."""
    if fabric.library == "nccl" and members.per_node > 1:  # NCCL has it for one GPU per node only
        return np.full_like(sizes, np.inf)
    return _doubling(sizes, members, fabric, sent=members.size - 1)


def _doubling(sizes: Seconds, members: _Ranks, fabric: Fabric, *, sent: float) -> Seconds:
    if members.nodes == 1:
        inside = _inside(fabric)
        return math.log2(members.size) * inside.latency + sent * sizes / inside.bandwidth
    latency = math.log2(members.size) * fabric.between.latency
    busy = members.per_node * members.groups  # all ranks of a node talk to other nodes at once
    return latency + sent * sizes * busy / fabric.between.bandwidth


def _pairwise(sizes: Seconds, members: _Ranks, fabric: Fabric) -> Seconds:
    """Returns the time of an all-to-all, in which each rank sends a part to each other rank."""
    parts = sizes / members.size
    outside = members.size - members.per_node
    time, slowest = 0.0, np.zeros_like(sizes)
    if members.per_node > 1:
        inside = _inside(fabric)
        time += (members.per_node - 1) * inside.latency
        slowest = (members.per_node - 1) * parts / inside.bandwidth
    if members.nodes > 1:
        busy = members.per_node * members.groups
        time += outside * fabric.between.latency
        slowest = np.maximum(slowest, outside * parts * busy / fabric.between.bandwidth)
    return time + slowest


def _inside(fabric: Fabric) -> Link:
    return fabric.between if fabric.inside is None else fabric.inside


# The library's algorithms, of which it takes the fastest.
_ALGORITHMS: dict[tuple[str, str], tuple[_Algorithm, ...]] = {
    ("gloo", "all_reduce"): (_gloo_all_reduce,),
    ("gloo", "all_gather"): (_ring_all_gather,),
    ("gloo", "all_to_all"): (_pairwise,),
    ("mpi", "all_reduce"): (_ring_all_reduce, _doubling_all_reduce),
    ("mpi", "all_gather"): (_ring_all_gather, _doubling_all_gather),
    ("mpi", "all_to_all"): (_pairwise,),
    ("nccl", "all_reduce"): (_ring_all_reduce, _double_tree),
    ("nccl", "all_gather"): (_ring_all_gather, _doubling_all_gather),
    ("nccl", "all_to_all"): (_pairwise,),
}
