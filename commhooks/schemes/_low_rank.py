"""Provides what low-rank schemes share: settings, random factors, messages, finiteness checks."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket
from commhooks.core._layout import Layout
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot, StepInfo
from commhooks.kernels import all_finite, subtract_low_rank
from commhooks.schemes._low_rank_plan import Plan, as_matrix, compressed_rank
from ddp_core import AllReduce, Collective, overlapped

__all__ = [
    "Factor",
    "and_fits",
    "average_factor",
    "check_rank",
    "check_rate",
    "draw",
    "fresh_factors",
    "random_factors",
    "work_buffer",
]


def check_rank(scheme: Scheme, rank: int) -> None:
    """Raises ``ValueError`` unless a rank is 1 or more."""
    if rank < 1:
        name = type(scheme).__name__
        raise ValueError(f"{name}(rank=...) is a whole number, 1 or more, got {rank!r}")


def check_rate(scheme: Scheme, rate: float) -> None:
    """Raises ``ValueError`` unless a smallest compression rate is 0 or more."""
    if rate < 0:
        raise ValueError(
            f"{type(scheme).__name__}(min_compression_rate=...) is a finite number, 0 or more "
            f"(0 compresses every matrix), got {rate!r}"
        )


def work_buffer(bucket: Bucket) -> Tensor:
    """Returns the tensor that receives the sum of gradient and residual.

    The sum overwrites ``raw`` where a scheme may do that: the less memory is touched, the faster.
    """
    if bucket.unsent is None:
        return bucket.raw
    keeps_raw = bucket.output.data_ptr() != bucket.raw.data_ptr()
    # 16 bits cannot hold the sum.
    return bucket.unsent if keeps_raw or bucket.raw.dtype != bucket.wide_dtype else bucket.raw


def average_factor(
    bucket: Bucket,
    plan: Plan,
    payload: Tensor,
    *,
    total: Tensor,
    local_copy: Tensor | None,
    other_factor: Tensor,
    is_left: bool,
) -> Generator[Collective, Tensor, Tensor]:
    """Averages a payload: a factor of each matrix, and the tail.

    While it is on its way, ``bucket.unsent`` receives what this rank's factor leaves out.

    Args:
        total: the sum of gradient and residual.
        local_copy: a copy of this rank's factor; None without feedback.
        other_factor: the second factor of each matrix, the same on every rank.
        is_left: the payload has left factors.
    """
    request, unsent = AllReduce(payload), bucket.unsent
    if local_copy is None or unsent is None:
        return (yield request)

    def keep_unsent() -> None:
        factor, tail = local_copy, None  # None: all of the tail
        if request.sent is not None:
            factor, tail = request.sent.split((local_copy.numel(), plan.tail_numel))
        left, right = (factor, other_factor) if is_left else (other_factor, factor)
        subtract_low_rank(plan.matrices, total, left, right, unsent, tail=plan.with_tail(tail))

    return (yield from overlapped(request, keep_unsent))


@dataclass(frozen=True)
class Factor(Slot):
    """Declares one factor per compressed matrix, random until a step writes it.

    Args:
        rank: rows of the factor; clipped to the sides of the matrix.
        rate: the smallest compression rate, see ``min_compression_rate`` of the schemes.
        side: 0: one column per row of the matrix (left factor); 1: one per column (right factor).
    """

    rank: int = 1
    rate: float = 2.0
    side: int = 1

    def shape(self, parameter: torch.Size) -> tuple[int, int] | None:
        used = compressed_rank(parameter, self.rank, self.rate)
        return (used, as_matrix(parameter)[self.side]) if used else None

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> Tensor:
        return draw(f"{name}/{self.key}", shape, now, 0).to(now.wide_dtype)

    def check(self, value: Tensor, parameter: torch.Size) -> str | None:
        if len(parameter) < 2:
            return f"belongs to a matrix, the parameter has shape {tuple(parameter)}"
        length = as_matrix(parameter)[self.side]
        # The rank is not checked: a state may come from another setting, see PowerSGD.
        if value.dim() != 2 or value.shape[1] != length:
            return f"has shape {tuple(value.shape)}, the parameter needs (rank, {length})"
        return None


def draw(name: str, shape: Sequence[int], now: StepInfo, step: int) -> Tensor:
    """Draws from N(0, 1) by parameter name: the same on every rank and in every bucket layout."""
    generator = now.generator(f"{name}/q", shared=True, step=step)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def random_factors(factors: Layout, bucket: Bucket, step: int, like: Tensor) -> Tensor:
    """Draws the factors of all parameters, flat, with rows of norm 1 on average."""
    drawn = [
        draw(name, shape, bucket, step).div_(math.sqrt(shape[1])).view(-1)
        for name, shape in zip(factors.names, factors.shapes, strict=True)
    ]
    return torch.cat(drawn).to(like)


@lru_cache(maxsize=256)
def fresh_factors(factors: Layout, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns random factors that replace vanished rows, with the same bits on every rank."""
    # By seed alone, not by step: drawing them again in each step would cost more than the scheme.
    like = torch.empty(0, device=device, dtype=dtype)
    return random_factors(factors, Bucket(like, factors, seed=seed), 0, like)


def and_fits(finite: Tensor, output: Tensor) -> Tensor:
    """Returns whether a mean is ``finite`` and stayed so in the dtype of ``output``."""
    # Factors are float32. bfloat16 has the range of float32; only float16 can overflow.
    return finite & all_finite(output) if output.dtype == torch.float16 else finite
