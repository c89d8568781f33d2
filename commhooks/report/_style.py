"""Defines the colours and labels of all pictures."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BLUE", "GREEN", "GREY", "OKABE_ITO", "ORANGE", "PURPLE", "RED", "SKY", "spread"]


BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, GREY = "#D55E00", "#56B4E9", "#7F7F7F"
OKABE_ITO = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)


def spread(wanted: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Returns positions near the wanted ones, at least ``least`` apart.

    Args:
        wanted: positions, in any order.
        least: distance of two neighbours; less if they would not fit.
        low, high: all positions are between these.

    Example:
        >>> spread([0.5, 0.5], 0.2, 0.0, 1.0)
        [0.4, 0.6]
    """
    if not wanted:
        return []
    least = min(least, (high - low) / max(len(wanted) - 1, 1))
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # Groups of labels that touch: each is centred on what its members want.
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _end(groups[-2], wanted, least, low, high) + least > _begin(
            groups[-1], wanted, least, low, high
        ):
            last = groups.pop()
            groups[-1] += last
    places = [0.0] * len(wanted)
    for group in groups:
        begin = _begin(group, wanted, least, low, high)
        for place, index in enumerate(group):
            places[index] = round(begin + place * least, 12)
    return places


def _begin(
    group: Sequence[int], wanted: Sequence[float], least: float, low: float, high: float
) -> float:
    length = (len(group) - 1) * least
    centre = sum(wanted[index] for index in group) / len(group)
    return min(max(centre - length / 2, low), high - length)


def _end(
    group: Sequence[int], wanted: Sequence[float], least: float, low: float, high: float
) -> float:
    return _begin(group, wanted, least, low, high) + (len(group) - 1) * least
