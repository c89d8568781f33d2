"""``Traits``: what a scheme declares about itself, and what laws, wrappers and reports ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

__all__ = ["Biased", "ErrorKind", "Exact", "Returns", "Traits", "Unbiased", "composed", "worst"]

Returns = Literal["mean", "update", "local"]


@dataclass(frozen=True)
class Exact:
    """The mean is exact, up to the rounding of the dtype in which it travels."""

    variance: ClassVar[float] = 0.0


@dataclass(frozen=True)
class Biased:
    """The expected result is not the mean: the scheme converges only with error feedback."""

    variance: ClassVar[float] = 0.0


@dataclass(frozen=True)
class Unbiased:
    """The expected result is the mean.

    Args:
        variance: upper bound of ``E|C(x) - x|^2 / |x|^2``. Error feedback around a scheme whose
            variance is above 1 needs :class:`commhooks.wrappers.Scaled`.
    """

    variance: float


ErrorKind = Exact | Biased | Unbiased


class Traits(NamedTuple):
    """Declares how a scheme behaves; wrappers forward the value or replace some fields.

    Attributes:
        rounds: largest number of collectives per bucket.
        error: ``Exact()``, ``Biased()`` or ``Unbiased(variance)``.
        returns: "mean": the average of the gradients over ranks. "update": something else that the
            optimizer uses in its place (momentum, signs), around which error feedback has no
            meaning. "local": no average (the no-op scheme).
        agrees: every rank gets the same bits. False: gossip, which averages over some ranks.
        coalesce: all buckets of a step travel in one exchange.
        starts_dense: name of the setting that counts the dense steps at the start; "" for none.

    Example:
        >>> Traits(rounds=2, error=Biased()).biased
        True
    """

    rounds: int = 1
    error: ErrorKind = Exact()
    returns: Returns = "mean"
    agrees: bool = True
    coalesce: bool = False
    starts_dense: str = ""

    @property
    def biased(self) -> bool:
        """Whether the scheme converges only with error feedback."""
        return isinstance(self.error, Biased)

    @property
    def averages(self) -> bool:
        """Whether ranks exchange anything at all: not "local"."""
        return self.returns != "local"


def worst(traits: Iterable[Traits]) -> Traits:
    """The traits of a scheme that runs any one of several schemes."""
    every = list(traits)
    order: list[Returns] = ["mean", "local", "update"]
    errors: list[ErrorKind] = [one.error for one in every]
    biased = any(isinstance(error, Biased) for error in errors)
    return Traits(
        rounds=max(one.rounds for one in every),
        error=Biased() if biased else max(errors, key=lambda error: error.variance),
        returns=max((one.returns for one in every), key=order.index),
        agrees=all(one.agrees for one in every),
        coalesce=any(one.coalesce for one in every),
    )


def composed(*errors: ErrorKind) -> ErrorKind:
    """The error of roundings that follow one another."""
    if any(isinstance(error, Biased) for error in errors):
        return Biased()
    variance = math.prod(1.0 + error.variance for error in errors) - 1.0
    return Unbiased(variance) if variance else Exact()
