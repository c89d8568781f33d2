"""``Dense``: the exchange that every wrapper falls back on."""

from __future__ import annotations

from dataclasses import dataclass

from commhooks.core.bucket import Bucket, SchemeExchange
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Scheme

__all__ = ["Dense"]


@register_scheme("none", "allreduce")
@dataclass(frozen=True)
class Dense(Scheme):
    """Averages the gradient by one all-reduce in its own dtype, bit-equal to plain DDP.

    Example:
        >>> hook = register(ddp_model, "none")
    """

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return (yield from bucket.all_reduce())
