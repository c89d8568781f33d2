"""Defines ``Traits``, by which a scheme declares its behaviour to laws, wrappers and reports."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

__all__ = [
    "INT32_PLACES",
    "Biased",
    "ErrorKind",
    "Exact",
    "Returns",
    "Traits",
    "Unbiased",
    "composed",
    "worst",
]

Returns = Literal["mean", "update", "local"]

INT32_PLACES = 2**31 - 1  # entries that 32 bits can number


@dataclass(frozen=True)
class Exact:
    """Declares that the mean is exact, up to the rounding of the dtype in which it travels."""

    variance: ClassVar[float] = 0.0


@dataclass(frozen=True)
class Biased:
    """Declares that the expected result is not the mean.

    Such a scheme converges only with error feedback.
    """

    variance: ClassVar[float] = 0.0  # no bound is declared; feedback limits unbiased schemes only


@dataclass(frozen=True)
class Unbiased:
    """Declares that the expected result is the mean.

    Args:
        variance: upper bound of ``E|C(x) - x|^2 / |x|^2`` for the gradient x of a single rank. With
            a scale that several ranks share errors are larger, by ``Scheme.error_growth``. Error
            feedback around a scheme whose variance is above 1 needs
            :class:`commhooks.wrappers.Scaled`.
    """

    variance: float


ErrorKind = Exact | Biased | Unbiased


class Traits(NamedTuple):
    """Declares how a scheme behaves; wrappers forward the value or replace some fields.

    Attributes:
        rounds: largest number of collectives per bucket.
        error: ``Exact()``, ``Biased()`` or ``Unbiased(variance)``.
        returns: "mean": the average of the gradients over ranks. "update": another tensor that the
            optimizer uses in place of a gradient (momentum, signs), around which error feedback has
            no meaning. "local": the gradient of this rank (the no-op scheme).
        agrees: every rank gets the same bits. False: averages over some ranks only (gossip).
        coalesce: all buckets of a step travel in one exchange.
        dense_warmup: name of the setting that counts the dense steps at the start; "" for none.
        max_bucket_numel: number of entries that an exchange may have. Larger buckets are cut
            between parameters: before the first step is over, both DistributedDataParallel classes
            may put a whole model into one bucket. Schemes whose places are 32 bits declare it.
        shards: returns this rank's shard of the mean alone where ``bucket.shards`` asks for no more
            (a reduce-scatter). Hosts that shard gradients, such as FSDP2, take these schemes only.
        per_parameter: the relative error of a parameter does not depend on the sizes of other
            gradients in the bucket. False: entries of several parameters share a scale, or compete
            for places or bits, so a parameter with small gradients may get hardly anything else
            than noise.
        keeps_zeros: each entry that is zero on all ranks arrives as zero. False: rounding errors
            may reach it, which Adam, whose second moment is zero there, makes a full step of.

    Example:
        >>> Traits(rounds=2, error=Biased()).biased
        True
    """

    rounds: int = 1
    error: ErrorKind = Exact()
    returns: Returns = "mean"
    agrees: bool = True
    coalesce: bool = False
    dense_warmup: str = ""
    max_bucket_numel: int = sys.maxsize
    shards: bool = False
    per_parameter: bool = False
    keeps_zeros: bool = False

    @property
    def biased(self) -> bool:
        """Whether the scheme converges only with error feedback."""
        return isinstance(self.error, Biased)

    @property
    def averages(self) -> bool:
        """Whether no step returns this rank's own gradient: ``returns`` is not "local"."""
        return self.returns != "local"


def worst(traits: Iterable[Traits]) -> Traits:
    """Returns the traits of a scheme that runs any one of several schemes.

    Args:
        traits: traits of the schemes, at least one.
    """
    choices = list(traits)
    # The last of these that occurs holds for the whole: only "mean" allows feedback around it.
    order: list[Returns] = ["mean", "local", "update"]
    errors: list[ErrorKind] = [choice.error for choice in choices]
    biased = any(isinstance(error, Biased) for error in errors)
    return Traits(
        rounds=max(choice.rounds for choice in choices),
        error=Biased() if biased else max(errors, key=lambda error: error.variance),
        returns=max((choice.returns for choice in choices), key=order.index),
        agrees=all(choice.agrees for choice in choices),
        coalesce=any(choice.coalesce for choice in choices),
        max_bucket_numel=min(choice.max_bucket_numel for choice in choices),
        shards=all(choice.shards for choice in choices),
        per_parameter=all(choice.per_parameter for choice in choices),
        keeps_zeros=all(choice.keeps_zeros for choice in choices),
    )


def composed(*errors: ErrorKind) -> ErrorKind:
    """Returns the error of several roundings, one after the other."""
    if any(isinstance(error, Biased) for error in errors):
        return Biased()
    # E|C(x)|^2 <= (1 + variance) |x|^2 for an unbiased C; such factors multiply.
    variance = math.prod(1.0 + error.variance for error in errors) - 1.0
    return Unbiased(variance) if variance else Exact()
