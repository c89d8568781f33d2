"""Defines PowerSGD: gradients as products of two thin matrices, one power iteration per step."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot, StepInfo
from commhooks.core._traits import Biased, Traits
from commhooks.kernels import (
    all_finite,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    unit_rows,
)
from commhooks.schemes._low_rank import (
    Factor,
    and_fits,
    average_factor,
    check_rank,
    check_rate,
    draw,
    fresh_factors,
    random_factors,
    work_buffer,
)
from commhooks.schemes._low_rank_plan import (
    Plan,
    compressed_rank,
    payload_numel,
    plan_bucket,
)
from ddp_core import AllReduce

__all__ = ["PowerSGD", "payload_numel", "power_iteration"]

KEY = "powersgd.q"


class RightFactor(Factor):
    """Declares the factor Q that a step starts from; fitting rows of another rank's Q serve."""

    def initial(self, name: str, shape: torch.Size, now: StepInfo) -> Tensor:
        new, old = draw(name, shape, now, 0), now.memory.get(self.key, name)
        if old is not None and old.dim() == 2 and old.shape[1] == shape[1] and old.numel():
            # New rows get the norm of the longest old one: unit_rows replaces rows that are far
            # shorter than the longest, and would take the old rows for rounding errors.
            new *= torch.linalg.vector_norm(old, dim=1).max().to(new) / math.sqrt(shape[1])
            rows = min(len(old), len(new))
            new[:rows] = old[:rows]
        return new.to(now.wide_dtype)


@register_scheme("powersgd")
@dataclass(frozen=True)
class PowerSGD(Scheme):
    """Sends each gradient matrix M (n x m) as two thin factors of rank r.

    With Q from the last step: ``P = orthonormalise(mean(M Q^T))``, ``Q = mean(P^T M)``, and the
    mean gradient is approximated by ``P Q``, its projection on the columns of P. Both means are
    all-reduces; the second also carries the parameters that are not worth compressing, vectors
    among them. A parameter of more than two dimensions is a matrix of ``shape[0]`` rows.

    Biased: use with ``ErrorFeedback``. Payload per matrix: ``r * (n + m)`` entries, in float32
    for 16-bit gradients; ``Cast`` around it halves that. Gradients of rank r arrive exactly.
    If any value of any rank is not finite, every matrix entry of the bucket arrives as NaN.

    Args:
        rank: r, the columns of P and rows of Q; clipped to ``min(n, m)`` per matrix.
        min_compression_rate: a matrix is compressed if both factors together, times this, have
            fewer entries than the matrix.
        warm_start: starts from the last step's Q, which over steps finds the best rank-r
            approximation; else from a new random Q each step.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(PowerSGD(rank=4)))

    Reference: Vogels, Karimireddy and Jaggi, PowerSGD, 2019.
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    warm_start: bool = True

    traits = Traits(rounds=2, error=Biased(), per_parameter=True)

    def __post_init__(self) -> None:
        check_rank(self, self.rank)
        check_rate(self, self.min_compression_rate)

    @cached_property
    def keeps(self) -> tuple[Slot, ...]:
        slot = RightFactor(KEY, rank=self.rank, rate=self.min_compression_rate)
        return (slot,) if self.warm_start else ()

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        return bool(compressed_rank(shape, self.rank, self.min_compression_rate))

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        plan = plan_bucket(bucket.layout, self.rank, self.min_compression_rate)
        if not len(plan.matrices):
            return (yield from bucket.all_reduce())
        return (yield from power_iteration(bucket, plan, self.keeps))


def power_iteration(bucket: Bucket, plan: Plan, keeps: Sequence[Slot]) -> SchemeExchange:
    """Sends the matrices of a plan as two factors, and the tail with the second.

    Args:
        bucket: the bucket.
        plan: its matrices, at least one, and its tail.
        keeps: the slot of the factors to start from; none if they are drawn anew in each step.
    """
    matrices = plan.matrices
    # P = M Q^T. The kernel adds the residual in the same pass (docs/design/kernels.md), and
    # gathers the tail for the second payload.
    right = _right_factors(bucket, plan, keeps)
    raw, residual, total = bucket.raw, bucket.residual, work_buffer(bucket)
    sizes = (matrices.right_numel, plan.tail_numel)
    payload = right.new_empty(sum(sizes))
    q, tail = payload.split(sizes)
    left = right.new_empty(matrices.left_numel)
    multiply_right(
        *(matrices, raw, right, left),
        residual=residual,
        total=total,
        tail=plan.with_tail(tail),
    )
    left = yield AllReduce(left)
    orthonormalize(matrices, left)  # the same bits on every rank

    # Q = P^T M. Feedback needs this rank's own Q, and the all-reduce works in place.
    local_copy = None if bucket.unsent is None else torch.empty_like(q)
    multiply_left(matrices, total, left, q, local_copy=local_copy)
    # The residual is M - P Q_i with this rank's own Q_i. The distance to the mean would collect
    # what other ranks sent, and only its sum over ranks would be bounded.
    payload = yield from average_factor(
        *(bucket, plan, payload),
        total=total,
        local_copy=local_copy,
        other_factor=left,
        is_left=False,
    )
    # One check covers both payloads: an entry of P that is not finite makes a whole row of Q
    # NaN (docs/design/kernels.md).
    finite = all_finite(payload)
    q, tail = payload.split(sizes)
    for slot in keeps:
        bucket.write(slot, q)

    output = bucket.output
    # A value that is not finite spoils only some entries of P and Q: the kernel takes the flag.
    decode_low_rank(matrices, left, q, output, finite=finite, tail=plan.with_tail(tail))
    return Result(output, unsent=bucket.unsent, finite=and_fits(finite, output))


def _right_factors(bucket: Bucket, plan: Plan, keeps: Sequence[Slot]) -> Tensor:
    """Returns the right factors to start from, flat."""
    factors, device, dtype = plan.factors, bucket.raw.device, bucket.wide_dtype
    if not keeps:
        like = torch.empty(0, device=device, dtype=dtype)
        return random_factors(factors, bucket, bucket.step, like)
    old = bucket.read(keeps[0])
    # Committed values may not change: a step that is not finite goes back to them.
    right = torch.empty_like(old)
    fresh = fresh_factors(factors, bucket.seed, device, dtype)
    unit_rows(plan.matrices, old, fresh, right)
    return right
