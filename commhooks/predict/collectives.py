"""Computes how long a collective takes on a fabric, by the algorithm that the library chooses.

Times are in seconds, sizes in bytes: those that one rank hands to the collective. All functions
take arrays of sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commhooks.predict.fabric import Fabric, Link

__all__ = ["collective_seconds"]

Seconds = NDArray[np.float64]


def collective_seconds(
    collective: str,
    nbytes: ArrayLike,
    *,
    ranks: int,
    fabric: Fabric,
    part: Sequence[int] | None = None,
) -> Seconds:
    """Returns the time of a collective.

    Args:
        collective: "all_reduce", "all_gather" or "all_to_all".
        nbytes: bytes that each rank hands to it, any shape.
        ranks: all ranks of the job.
        fabric: the links.
        part: the ranks that take part, of ``range(ranks)``; all by default.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    members = ranks if part is None else len(part)
    per_node = min(fabric.ranks_per_node, ranks)
    if part is not None:
        per_node = math.ceil(members / len({rank // per_node for rank in part}))
    if members <= 1:
        return np.zeros_like(sizes)
    nodes = math.ceil(members / per_node)
    link = _joined(fabric, nodes, per_node)
    return _BY_NAME[collective](sizes, members, link)


def _joined(fabric: Fabric, nodes: int, per_node: int) -> Link:
    """Returns the link of a ring through all ranks: the slower of both levels per rank."""
    if nodes == 1 and fabric.inside is not None:
        return fabric.inside
    if per_node == 1 or fabric.inside is None:
        return fabric.between
    bandwidth = min(fabric.inside.bandwidth, fabric.between.bandwidth)
    hops = nodes * per_node
    latency = (nodes * fabric.between.latency + (hops - nodes) * fabric.inside.latency) / hops
    return Link(latency, bandwidth)


def _ring_all_reduce(sizes: Seconds, ranks: int, link: Link) -> Seconds:
    return 2 * (ranks - 1) * (link.latency + sizes / ranks / link.bandwidth)


def _all_gather(sizes: Seconds, ranks: int, link: Link) -> Seconds:
    return (ranks - 1) * (link.latency + sizes / link.bandwidth)


def _all_to_all(sizes: Seconds, ranks: int, link: Link) -> Seconds:
    return (ranks - 1) * (link.latency + sizes / ranks / link.bandwidth)


_BY_NAME = {
    "all_reduce": _ring_all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}
