"""Fits links to measured times of collectives, through the model that predictions use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from commhooks.predict.collectives import collective_seconds
from commhooks.predict.fabric import COPIED, Fabric, Library, Link

__all__ = ["COLLECTIVES", "Layout", "Part", "Time", "fitted", "modelled"]

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
Part = Literal["inside", "between", "all"]
# Where links are looked for, as powers of ten: seconds, and bytes per second.
_LATENCY, _BANDWIDTH = (-7.0, 0.0), (4.0, 13.0)
_POINTS, _ZOOMS = 19, 5


@dataclass(frozen=True)
class Layout:
    """Describes how many ranks there are, and how many of them share a node."""

    ranks: int
    per_node: int


class Time(NamedTuple):
    """Holds a measured time of a collective.

    Attributes:
        part: which ranks took part: those of a node, one of each node, or all.
        collective: its name.
        nbytes: bytes that each rank handed to it.
        seconds: median over rounds of the slowest rank's time.
        low_s, high_s: the middle half of the rounds is between them.
    """

    part: Part
    collective: str
    nbytes: int
    seconds: float
    low_s: float
    high_s: float


def fitted(
    layout: Layout, times: Sequence[Time], library: Library, *, overlap: float = 0.0
) -> Fabric:
    """Returns the fabric under which the model's times come nearest to measured ones.

    Nearest by the sum of absolute logarithms of their ratios: small and large sizes count alike,
    and a few odd times move nothing. Between nodes, one rank per node tells the latency; the
    bandwidth is the higher one of these ranks' and of all ranks', since several network cards need
    several ranks, and all ranks together may be bound by the link inside a node.

    Args:
        layout: of the ranks.
        times: the measurements.
        library: what carried them.
        overlap: of the latencies of several messages; see :class:`commhooks.predict.Fabric`.
    """
    one_node = layout.per_node == layout.ranks
    empty = Fabric(
        "measured", Link(0.0, 1.0), library=library, overlap=overlap, source="commhooks link"
    )

    def inside(link: Link) -> Fabric:
        return replace(empty, between=link, inside=link, ranks_per_node=layout.per_node)

    if one_node:
        here = _nearest(layout, times, "inside", inside)
        return replace(inside(here), source=COPIED)
    if layout.per_node == 1:
        link = _nearest(layout, times, "between", lambda one: replace(empty, between=one))
        return replace(empty, between=link)
    here = _nearest(layout, times, "inside", inside)

    def between(link: Link) -> Fabric:
        return replace(empty, between=link, inside=here, ranks_per_node=layout.per_node)

    few = _nearest(layout, times, "between", between)
    whole = _nearest(layout, times, "all", between)
    return between(Link(few.latency, max(few.bandwidth, whole.bandwidth)))


def modelled(layout: Layout, time: Time, fabric: Fabric) -> float:
    """Returns what the model gives for a measurement."""
    return float(_modelled(layout, time.part, time.collective, [time.nbytes], fabric)[0])


def _modelled(
    layout: Layout, part: Part, collective: str, sizes: Sequence[int], fabric: Fabric
) -> np.ndarray:
    ranks, per_node = layout.ranks, layout.per_node
    if part == "inside":
        return collective_seconds(collective, sizes, ranks=per_node, fabric=fabric)
    leaders = range(0, ranks, per_node) if part == "between" and per_node > 1 else None
    return collective_seconds(
        collective, sizes, ranks=ranks, fabric=fabric, part=leaders, alone=True
    )


def _nearest(
    layout: Layout, times: Sequence[Time], part: Part, fabric_of: Callable[[Link], Fabric]
) -> Link:
    """Returns the link of a part; of several that fit equally, the slowest."""
    groups = []
    for collective in COLLECTIVES:
        some = [one for one in times if (one.part, one.collective) == (part, collective)]
        if some:
            seconds = np.array([one.seconds for one in some])
            groups.append((collective, [one.nbytes for one in some], np.log(seconds)))

    def distance(latency: float, bandwidth: float) -> float:
        fabric = fabric_of(Link(10.0**latency, 10.0**bandwidth))
        return sum(
            float(np.abs(np.log(_modelled(layout, part, name, sizes, fabric)) - logs).sum())
            for name, sizes, logs in groups
        )

    # A grid, and finer ones around its best point: whatever algorithms the model chooses by size,
    # there is nothing to differentiate.
    latencies, bandwidths = np.linspace(*_LATENCY, _POINTS), np.linspace(*_BANDWIDTH, _POINTS)
    best = math.inf, 0.0, 0.0
    for _ in range(_ZOOMS):
        best = min((distance(x, y), y, x) for x in latencies for y in bandwidths)
        _, y, x = best
        dx, dy = latencies[1] - latencies[0], bandwidths[1] - bandwidths[0]
        latencies = np.linspace(x - dx, x + dx, 7)
        bandwidths = np.linspace(y - dy, y + dy, 7)
    return Link(10.0 ** float(best[2]), 10.0 ** float(best[1]))
