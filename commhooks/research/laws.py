"""What a law of schemes is, and the gradients and ranks that laws are tried on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.core.scheme import Scheme
from commhooks.errors import Error
from commhooks.research.simulation import Simulation

__all__ = [
    "NUMEL",
    "SHAPES",
    "Law",
    "LawBroken",
    "Laws",
    "MakeScheme",
    "exact_mean",
    "gradients",
    "need",
    "normal",
    "ranks_of",
]

MakeScheme = Callable[[], Scheme]
SHAPES = {"weight": (24, 20), "bias": (24,), "conv": (6, 4, 3, 3), "row": (1, 33), "one": (1,)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


class LawBroken(Error, AssertionError):
    """A law does not hold; the message has the input."""


class Law(NamedTuple):
    """A check that raises ``LawBroken``, and which schemes need not pass it."""

    check: Callable[[MakeScheme], None]
    of_averages: bool  # those that make an update need not
    of_agreement: bool  # those whose ranks may differ need not

    def is_for(self, scheme: Scheme) -> bool:
        """Whether ``scheme`` has to pass it."""
        if self.of_averages and scheme.traits.returns == "update":
            return False
        return scheme.traits.agrees or not self.of_agreement


class Laws(dict[str, Law]):
    """Laws by what they say, in the order in which they are checked."""

    def add(
        self, text: str, *, of_averages: bool = False, of_agreement: bool = False
    ) -> Callable[[Callable[[MakeScheme], None]], Callable[[MakeScheme], None]]:
        """Decorates the check of a law."""

        def decorate(check: Callable[[MakeScheme], None]) -> Callable[[MakeScheme], None]:
            self[text] = Law(check, of_averages, of_agreement)
            return check

        return decorate


def need(holds: bool | Tensor, message: str) -> None:
    """Raises ``LawBroken`` unless it holds."""
    if not holds:
        raise LawBroken(message)


def normal(numel: int, *seed: int) -> Tensor:
    """Draws N(0, 1), the same for the same numbers of ``seed``."""
    number = 1
    for part in seed:
        number = number * 1009 + part
    return torch.randn(numel, generator=torch.Generator().manual_seed(number))


def gradients(world_size: int, step: int, numel: int = NUMEL) -> list[Tensor]:
    """Makes the gradient of each rank in a step."""
    return [normal(numel, step, rank) for rank in range(world_size)]


def exact_mean(grads: Sequence[Tensor]) -> Tensor:
    """Averages in float64."""
    return torch.stack([grad.double() for grad in grads]).mean(0)


def ranks_of(scheme: Scheme, world_size: int, numel: int | None = None) -> Simulation:
    """Simulates ranks on ``SHAPES``, or on one parameter of ``numel`` entries."""
    shapes = SHAPES if numel is None else {"p": (numel,)}
    return Simulation(scheme, shapes, world_size=world_size, seed=5)
