"""Defines ``ShardedBucket``, a bucket of a host that shards parameters over ranks."""

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
    """Describes a flat gradient of a host such as FSDP2, which holds pieces of parameters.

    Has the methods of DistributedDataParallel's bucket that a hook calls.

    Attributes:
        number: of the bucket, the same in every step.
        gradient: flat, all shards one after the other; may be overwritten.
        layout: names and shapes of the pieces of parameters in it.
        shards: begin and end of the entries whose mean each rank needs; None: all of them.
        output: flat, takes the mean of what this rank needs; None: the gradient's own memory.
    """

    number: int
    gradient: Tensor
    layout: Layout
    shards: Sequence[Span] | None = None
    output: Tensor | None = None

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
