"""Defines laws of schemes, and the gradients and ranks on which they are checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from commhooks.core._scheme import Scheme
from commhooks.errors import Error
from commhooks.research._simulation import Simulation

__all__ = [
    "LATE",
    "NUMEL",
    "SHAPES",
    "Law",
    "LawBroken",
    "Laws",
    "MakeScheme",
    "begun",
    "check_law",
    "exact_mean",
    "from_step",
    "gradients",
    "in_words",
    "normal",
    "ranks_of",
]

MakeScheme = Callable[[], Scheme]
# 754 entries, no multiple of a block (32, 256): the end of a bucket is where kernels and codecs go
# wrong. Low-rank schemes compress "weight" and "conv", and send all others as they are.
SHAPES = {"weight": (24, 20), "bias": (24,), "conv": (6, 4, 3, 3), "row": (1, 33), "one": (1,)}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())
LATE = 10**6  # a step after all warm-ups


class LawBroken(Error, AssertionError):
    """Raised when a scheme breaks a law; the message describes the input."""


class Law(NamedTuple):
    """Holds a check of schemes, and the kinds of schemes that are exempt.

    Attributes:
        check: raises ``LawBroken``.
        of_averages: exempts schemes that return an update for the optimizer.
        of_agreement: exempts schemes whose ranks may get different averages.
        claim: exempts schemes whose traits do not have this one, by its name; "": none.
        guide: heading of the paragraph on it in ``docs/guides/new-scheme.md``.
    """

    check: Callable[[MakeScheme], None]
    of_averages: bool
    of_agreement: bool
    claim: str
    guide: str

    def exempts(self, scheme: Scheme) -> str:
        """Returns why ``scheme`` does not have to obey this law, or "" if it has to."""
        if self.of_averages and scheme.traits.returns == "update":
            return 'of an average (returns="update")'
        if self.claim and not getattr(scheme.traits, self.claim):
            return f"of a claim that is not made ({self.claim})"
        if self.of_agreement and not scheme.traits.agrees:
            return "of equal averages on all ranks (agrees=False)"
        return ""


class Laws(dict[str, Law]):
    """Maps the text of each law to its check, in the order in which laws are checked."""

    def add(
        self,
        text: str,
        *,
        of_averages: bool = False,
        of_agreement: bool = False,
        claim: str = "",
        guide: str = "The checks a scheme has to pass",
    ) -> Callable[[Callable[[MakeScheme], None]], Callable[[MakeScheme], None]]:
        """Returns a decorator that registers the check of a law."""

        def decorate(check: Callable[[MakeScheme], None]) -> Callable[[MakeScheme], None]:
            self[text] = Law(check, of_averages, of_agreement, claim, guide)
            return check

        return decorate


def check_law(holds: bool | Tensor, message: str) -> None:
    """Raises ``LawBroken`` with ``message`` unless ``holds``."""
    if not holds:
        raise LawBroken(message)


def normal(numel: int, *seed: int) -> Tensor:
    """Draws from N(0, 1); equal numbers in ``seed`` give equal entries."""
    # A generator of this call only: laws do not depend on their order, or on what a scheme draws.
    number = 1
    for part in seed:
        number = number * 1009 + part
    generator = torch.Generator().manual_seed(number)
    return torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")


def gradients(world_size: int, step: int, numel: int = NUMEL) -> list[Tensor]:
    """Draws the gradient of each rank in a step."""
    return [normal(numel, step, rank) for rank in range(world_size)]


def exact_mean(grads: Sequence[Tensor]) -> Tensor:
    """Returns the mean over ranks, in float64."""
    return torch.stack([grad.double() for grad in grads]).mean(0)


def in_words(world_size: int) -> str:
    """Returns a number of ranks for a message."""
    return f"{world_size} rank{'s' * (world_size != 1)}"


_first_step: ContextVar[int] = ContextVar("first step", default=0)
S = TypeVar("S", bound=Simulation)


@contextmanager
def from_step(step: int) -> Iterator[None]:
    """Makes the ranks of laws begin at a step inside the ``with`` block."""
    token = _first_step.set(step)
    try:
        yield
    finally:
        _first_step.reset(token)


def begun(ranks: S) -> S:
    """Returns simulated ranks at the step with which laws begin."""
    for engine in ranks.engines:
        engine.step = _first_step.get()
    return ranks


def ranks_of(scheme: Scheme, world_size: int, numel: int | None = None) -> Simulation:
    """Returns simulated ranks with parameters of ``SHAPES``, or one of ``numel`` entries."""
    shapes = SHAPES if numel is None else {"p": (numel,)}
    return begun(Simulation(scheme, shapes, world_size=world_size, seed=5))
