"""Defines batched PowerSGD: one power iteration per step on a bucket as one square matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, SchemeExchange
from commhooks.core._layout import Layout
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot, StepInfo
from commhooks.core._traits import Biased, Traits
from commhooks.kernels import Matrices, tail_table
from commhooks.schemes._low_rank import check_rank, draw
from commhooks.schemes._low_rank_plan import Plan
from commhooks.schemes.powersgd import power_iteration

__all__ = ["BatchedPowerSGD"]

KEY = "batched_powersgd.q"


@dataclass(frozen=True)
class _Factor(Slot):
    """Declares one factor per bucket, kept under the name of the bucket's first parameter."""

    rank: int = 1

    def shape(self, parameter: torch.Size) -> None:
        return None  # kept per bucket, see ``layout``

    def layout(self, layout: Layout) -> Layout:
        side = _side(layout.numel)
        return Layout(layout.names[:1], [(min(self.rank, side), side)])

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> Tensor:
        return draw(name, shape, now, 0)

    def check(self, value: Tensor, parameter: torch.Size) -> str | None:
        if not value.is_floating_point():
            return f"is of {value.dtype}, a factor is floating point"
        if value.dim() != 2 or not 0 < value.shape[0] <= value.shape[1]:
            return f"has shape {tuple(value.shape)}, needs (rank, side)"
        return None


@register_scheme("batched_powersgd")
@dataclass(frozen=True)
class BatchedPowerSGD(Scheme):
    """Sends a bucket, as one square matrix, as two thin factors: fewer bytes, less accurate.

    PowerSGD on the whole bucket, padded by zeros to a square of side ``ceil(sqrt(numel))``. The
    bucket is not copied or resized: the padding takes part in the formulas only.

    Biased: use with ``ErrorFeedback``. Payload: ``2 * rank * side`` entries per bucket; a bucket
    that is no larger is averaged densely. If any value of any rank is not finite, the whole bucket
    arrives as NaN. The warm start is kept per bucket, and lost when DDP or a resumed job forms
    other buckets.

    Args:
        rank: rows of both factors; usually 1 or 2.
        warm_start: starts from the last step's Q; else from a new random Q each step.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(BatchedPowerSGD(rank=2)))

    Reference: ``batched_powerSGD_hook`` of PyTorch.
    """

    rank: int = 1
    warm_start: bool = True

    traits = Traits(rounds=2, error=Biased())

    def __post_init__(self) -> None:
        check_rank(self, self.rank)

    @cached_property
    def keeps(self) -> tuple[Slot, ...]:
        return (_Factor(KEY, rank=self.rank),) if self.warm_start else ()

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n = bucket.raw.numel()
        side = _side(n)
        rank = min(self.rank, side)
        if 2 * rank * side >= n:
            return (yield from bucket.all_reduce())
        return (yield from power_iteration(bucket, _plan(bucket.layout, rank), self.keeps))


def _side(n: int) -> int:
    """Returns the side of the smallest square that holds ``n`` entries."""
    return math.isqrt(max(n - 1, 0)) + 1


@lru_cache(maxsize=1024)
def _plan(layout: Layout, rank: int) -> Plan:
    """Returns the plan of a bucket: its square matrix, without the rows that hold no entry."""
    n, side = layout.numel, _side(layout.numel)
    square = Matrices([(0, -(-n // side), side, rank)], n)
    return Plan(square, tail_table([]), _Factor(KEY, rank=rank).layout(layout), 0)
