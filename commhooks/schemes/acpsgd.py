"""Defines ACP-SGD: low-rank gradients in one collective per step, left and right factor in turn."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot
from commhooks.core._traits import Biased, Traits
from commhooks.kernels import (
    all_finite,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
)
from commhooks.schemes._low_rank import (
    Factor,
    and_fits,
    average_factor,
    check_rank,
    check_rate,
    work_buffer,
)
from commhooks.schemes._low_rank_plan import Plan, compressed_rank, plan_bucket

__all__ = ["ACPSGD"]

LEFT, RIGHT = "acpsgd.p", "acpsgd.q"  # names in checkpoints


@register_scheme("acpsgd")
@dataclass(frozen=True)
class ACPSGD(Scheme):
    """Sends one thin factor of each gradient matrix per step, half of PowerSGD's bytes.

    In even steps ``P = mean(M Q^T)`` with the orthonormal Q of the step before, in odd ones
    ``Q = mean(P^T M)`` with the orthonormal P of the step before; the mean gradient is the product.
    One all-reduce, which also carries the parameters that are not worth compressing.

    Biased: use with ``ErrorFeedback``. Gradients of rank r that keep their row space arrive exactly
    from the second step on. If any value of any rank is not finite, every matrix entry of the
    bucket arrives as NaN.

    Args:
        rank: rank of the factors; clipped to ``min(n, m)`` per matrix.
        min_compression_rate: a matrix is compressed if both factors together, times this, have
            fewer entries than the matrix.

    Example:
        >>> hook = register(ddp_model, "acpsgd", rank=4)

    Reference: Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed
    Deep Learning, 2023. Here all ranks draw the same initial factors.
    """

    rank: int = 4
    min_compression_rate: float = 2.0

    traits = Traits(error=Biased(), per_parameter=True)

    def __post_init__(self) -> None:
        check_rank(self, self.rank)
        check_rate(self, self.min_compression_rate)

    @cached_property
    def keeps(self) -> tuple[Slot, Slot]:
        rank, rate = self.rank, self.min_compression_rate
        left = Factor(LEFT, rank=rank, rate=rate, side=0)
        return left, Factor(RIGHT, rank=rank, rate=rate, side=1)

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        return bool(compressed_rank(shape, self.rank, self.min_compression_rate))

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        plan = plan_bucket(bucket.layout, self.rank, self.min_compression_rate)
        matrices = plan.matrices
        if not len(matrices):
            return (yield from bucket.all_reduce())
        even = bucket.step % 2 == 0
        fixed = self._fixed(plan, bucket, even)
        sizes = (matrices.left_numel if even else matrices.right_numel, plan.tail_numel)
        payload = fixed.new_empty(sum(sizes))
        factor, tail = payload.split(sizes)
        # The all-reduce works in place, and the residual needs this rank's own factor.
        local_copy = None if bucket.unsent is None else torch.empty_like(factor)
        total = work_buffer(bucket)
        multiply = multiply_right if even else multiply_left
        multiply(
            *(matrices, bucket.raw, fixed, factor),
            residual=bucket.residual,
            total=total,
            local_copy=local_copy,
            tail=plan.with_tail(tail),
        )
        payload = yield from average_factor(
            *(bucket, plan, payload),
            total=total,
            local_copy=local_copy,
            other_factor=fixed,
            is_left=even,
        )
        new, tail = payload.split(sizes)
        finite = all_finite(payload)  # of the mean: the same on every rank
        bucket.write(self.keeps[0 if even else 1], new)
        left, right = (new, fixed) if even else (fixed, new)
        output = bucket.output
        decode_low_rank(matrices, left, right, output, finite=finite, tail=plan.with_tail(tail))
        return Result(output, unsent=bucket.unsent, finite=and_fits(finite, output))

    def _fixed(self, plan: Plan, bucket: Bucket, even: bool) -> Tensor:
        """Returns the factor of the step before, made orthonormal; random in the first step."""
        left, right = self.keeps
        # Committed values may not change, as a step that is not finite goes back to them.
        old = bucket.read(right if even else left)
        fixed = torch.empty_like(old)
        orthonormalize(plan.right_as_left if even else plan.matrices, old, fixed)
        return fixed
