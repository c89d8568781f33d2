"""Defines ``Noop``, which exchanges nothing."""

from __future__ import annotations

from dataclasses import dataclass

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._traits import Traits

__all__ = ["Noop"]


@register_scheme("noop")
@dataclass(frozen=True)
class Noop(Scheme):
    """Returns the local gradient without any exchange: a lower bound of any scheme's step time.

    For measurements only: the ranks' parameters diverge.
    """

    traits = Traits(rounds=0, returns="local", shards=True)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return Result(bucket.gradient[bucket.own_slice])
        yield  # makes this a generator function, as every exchange is
