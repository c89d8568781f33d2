"""Defines ``ReducerBucket``, a bucket of a reducer that calls no hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from commhooks.hook.call import plain

__all__ = ["ReducerBucket"]


@dataclass(frozen=True, eq=False)
class ReducerBucket:
    """Describes a bucket that DistributedDataParallel reduces by itself.

    Has the methods of DistributedDataParallel's bucket that a hook calls.

    Attributes:
        number: of the bucket.
        members: the parameters, in their order in the bucket.
        last: whether it is the last bucket of a step.
        gradient: flat; takes the result.
        exact: sums the gradient as it is, without a scheme.
    """

    number: int
    members: list[Tensor]
    last: bool
    gradient: Tensor
    exact: bool = False

    def index(self) -> int:
        """Returns the bucket's number."""
        return self.number

    def buffer(self) -> Tensor:
        """Returns the flat gradient."""
        return self.gradient

    def parameters(self) -> list[Tensor]:
        """Returns the parameters."""
        return self.members

    def is_last(self) -> bool:
        """Whether it is the last bucket of a step."""
        return self.last

    def wanted(self) -> dict[str, Any]:
        """Returns the arguments of ``Engine.exchange`` for it."""
        return {"run": plain("all_reduce", True)} if self.exact else {}
