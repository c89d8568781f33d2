"""Defines ``Dense``, the plain all-reduce.

It is here and not in ``commhooks.schemes`` because schedules run it by default, and wrappers import
no schemes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._layout import Span
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._traits import Traits

__all__ = ["Dense"]


@register_scheme("none", "allreduce")
@dataclass(frozen=True)
class Dense(Scheme):
    """Averages the gradient by one all-reduce in its own dtype, bit-equal to plain DDP.

    Example:
        >>> hook = register(ddp_model, "none")
    """

    traits = Traits(shards=True, per_parameter=True, keeps_zeros=True)
    gathers = True

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return (yield from bucket.all_reduce())

    def all_gather(self, bucket: Bucket, parts: Sequence[Span]) -> SchemeExchange:
        return (yield from bucket.all_gather(parts))
