"""Defines ``ShardedBucket``, a bucket of a host whose ranks need the mean of their shard only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.shards import Span

__all__ = ["ShardedBucket"]


@dataclass(frozen=True, eq=False)
class ShardedBucket:
    """Describes a flat gradient that a host such as FSDP2 reduces and scatters.

    Has the methods of DistributedDataParallel's bucket that a hook calls.

    Attributes:
        number: of the bucket, the same in every step.
        gradient: flat, all shards one after the other; may be overwritten.
        layout: names and shapes of the pieces of parameters in it.
        shards: begin and end of the shard of each rank.
        output: flat, takes the mean of this rank's shard.
    """

    number: int
    gradient: Tensor
    layout: Layout
    shards: Sequence[Span]
    output: Tensor

    def index(self) -> int:
        """Returns the bucket's number."""
        return self.number

    def buffer(self) -> Tensor:
        """Returns the flat gradient."""
        return self.gradient

    def parameters(self) -> list[Tensor]:
        """Returns no parameters: a bucket has pieces of them, which the layout names."""
        return []

    def is_last(self) -> bool:
        """Returns False: the host does not say which bucket is the last one of a step."""
        return False

    def wanted(self) -> dict[str, Any]:
        """Returns the arguments of ``Engine.exchange`` for it."""
        return {"shards": self.shards, "output": self.output}
