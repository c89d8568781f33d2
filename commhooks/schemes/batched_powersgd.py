"""Defines batched PowerSGD: one power iteration per step on a bucket as one square matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange, nan_unless
from commhooks.core._layout import Layout
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot, StepInfo
from commhooks.core._traits import Biased, Traits
from commhooks.kernels import Matrices, all_finite, orthonormalize, unit_rows
from commhooks.schemes._low_rank import (
    and_fits,
    check_rank,
    draw,
    fresh_factors,
    random_factors,
)
from ddp_core import AllReduce, overlapped

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
        gradient = bucket.gradient.to(bucket.wide_dtype)
        factors = _Factor(KEY, rank=rank).layout(bucket.layout)
        right, q = self._right_factor(factors, bucket)

        # P = M Q^T, over the rows that hold entries; those of the padding give zeros.
        parts = _square(gradient, side)
        p = right.new_zeros(rank, side)
        for rows, part in parts:
            p[:, rows] = right[:, : part.shape[1]] @ part.mT
        p = yield AllReduce(p)
        finite = all_finite(p)
        orthonormalize(_factors(side, rank), p)

        # Q = P^T M. Feedback needs this rank's own Q, and the all-reduce works in place.
        q.zero_()
        for rows, part in parts:
            q[:, : part.shape[1]].addmm_(p[:, rows], part)
        second, local_copy, unsent = AllReduce(q), q.clone(), bucket.unsent

        def keep_unsent() -> None:
            assert unsent is not None
            if unsent.data_ptr() != gradient.data_ptr():  # else the sum is already there
                unsent.copy_(gradient)
            sent = local_copy if second.sent is None else second.sent
            for rows, part in _square(unsent, side):
                part.addmm_(p[:, rows].mT, sent[:, : part.shape[1]], alpha=-1)

        q = (yield second) if unsent is None else (yield from overlapped(second, keep_unsent))
        finite = finite & all_finite(q)
        q.add_(nan_unless(finite))
        if self.warm_start:
            bucket.write(self.keeps[0], q)

        # M = P Q.
        for rows, part in _square(bucket.output, side):
            part.copy_(p[:, rows].mT @ q[:, : part.shape[1]])
        return Result(bucket.output, unsent=bucket.unsent, finite=and_fits(finite, bucket.output))

    def _right_factor(self, factors: Layout, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Returns the right factor (rank, side) to start from, and a tensor for the new one."""
        shape = factors.shapes[0]
        device, dtype = bucket.raw.device, bucket.wide_dtype
        if not self.warm_start:
            like = torch.empty(0, device=device, dtype=dtype)
            flat = random_factors(factors, bucket, bucket.step, like)
            return flat.view(shape), torch.empty_like(flat).view(shape)
        (slot,) = self.keeps
        old = bucket.read(slot)
        right = torch.empty_like(old)  # committed values may not change
        fresh = fresh_factors(factors, bucket.seed, device, dtype)
        unit_rows(_factors(shape[1], shape[0]), old, fresh, right)
        return right.view(shape), bucket.scratch(slot, like=old).view(shape)


def _side(n: int) -> int:
    """Returns the side of the smallest square that holds ``n`` entries."""
    return math.isqrt(max(n - 1, 0)) + 1


@lru_cache(maxsize=1024)
def _factors(side: int, rank: int) -> Matrices:
    """Returns the table of one square, for kernels that work on its factors alone."""
    return Matrices([(0, side, side, rank)])


def _square(flat: Tensor, side: int) -> list[tuple[slice, Tensor]]:
    """Returns the rows of the square that hold entries, with views: full rows, and a short last."""
    rows, short = divmod(flat.numel(), side)
    parts = [(slice(0, rows), flat[: rows * side].view(rows, side))]
    if short:
        parts.append((slice(rows, rows + 1), flat[rows * side :].view(1, short)))
    return parts
