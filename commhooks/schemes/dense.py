"""Schemes that send the gradient as it is, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from commhooks._bucket import Bucket, Result, SchemeExchange
from commhooks._registry import register_scheme
from commhooks._scheme import Scheme

__all__ = ["Dense", "Noop"]


@register_scheme("none", "allreduce")
@dataclass(frozen=True)
class Dense(Scheme):
    """Averages the gradient by one all-reduce in its own dtype, bit-equal to plain DDP.

    Example:
        >>> hook = register(ddp_model, "none")
    """

    linear = True

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return (yield from bucket.all_reduce())


@register_scheme("noop")
@dataclass(frozen=True)
class Noop(Scheme):
    """Returns the local gradient without any exchange: the step time no scheme can beat.

    For measuring headroom only; the ranks drift apart.
    """

    rounds = 0
    averages = False

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return Result(bucket.gradient)
        yield
