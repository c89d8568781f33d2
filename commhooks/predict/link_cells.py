"""Describes what the measurement of links issues: collectives of a part of the ranks, by size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ddp_core import AllGather, AllReduce, AllToAll
from ddp_core.exchange.collectives import Collective

__all__ = ["REQUESTS", "Cell", "Size"]


class Cell(NamedTuple):
    """Describes what is measured at once."""

    part: int
    collective: str
    nbytes: int


class Size(NamedTuple):
    """Holds what was measured of a size once, and the seconds that all has taken until then."""

    cells: list[Cell]
    bursts: list[int]
    seconds: list[float]
    took: float

    @property
    def cost(self) -> float:
        """Returns the seconds of a round."""
        return sum(one * often for one, often in zip(self.seconds, self.bursts, strict=True))


def _rows(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Returns a row per rank, of about as many bytes together."""
    return tensor.new_zeros(ranks, max(1, tensor.numel() // ranks))


REQUESTS: dict[str, Callable[[torch.Tensor, int], Collective]] = {
    "all_reduce": lambda tensor, ranks: AllReduce(tensor, "sum"),
    "all_gather": lambda tensor, ranks: AllGather(tensor),
    "all_to_all": lambda tensor, ranks: AllToAll(_rows(tensor, ranks)),
}
