"""ACP-SGD: low-rank gradients in one collective a step, left and right factors in turn."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks._bucket import Bucket, Result, SchemeExchange, nan_unless
from commhooks._memory import Layout
from commhooks._registry import register_scheme
from commhooks._scheme import Scheme
from commhooks.kernels import (
    all_finite,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
)
from commhooks.schemes._low_rank import (
    check_rank,
    check_rate,
    draw,
    fits,
    work_buffer,
)
from commhooks.schemes._low_rank_plan import Plan, as_matrix, compressed_rank, plan_bucket
from ddp_core import AllReduce

__all__ = ["ACPSGD"]

LEFT, RIGHT = "acpsgd.p", "acpsgd.q"


@register_scheme("acpsgd")
@dataclass(frozen=True)
class ACPSGD(Scheme):
    """Sends one thin factor of each gradient matrix a step: half of PowerSGD's bytes and rounds.

    In even steps ``P = mean(M Q^T)`` with the orthonormal Q of the step before, in odd ones
    ``Q = mean(P^T M)`` with that step's P; the mean gradient is the product. One all-reduce, in
    which parameters that do not pay to compress ride along.

    Biased: use with ``ErrorFeedback``. Gradients of rank r that keep their row space arrive exactly
    from the second step on. If any value of any rank is not finite, every matrix entry of the
    bucket arrives as NaN.

    Args:
        rank: of the factors; clipped to ``min(n, m)`` per matrix.
        min_compression_rate: a matrix is compressed if both factors, times this, are smaller.

    Example:
        >>> hook = register(ddp_model, "acpsgd", rank=4)

    Reference: Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed
    Deep Learning, 2023. Factors are drawn alike on all ranks here.
    """

    rank: int = 4
    min_compression_rate: float = 2.0

    biased = True
    linear = True
    stateful = True

    def __post_init__(self) -> None:
        check_rank(self, self.rank)
        check_rate(self, self.min_compression_rate)

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        return bool(compressed_rank(shape, self.rank, self.min_compression_rate))

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        plan = plan_bucket(bucket.layout, self.rank, self.min_compression_rate)
        matrices = plan.matrices
        if not len(matrices):
            return (yield from bucket.all_reduce())
        even = bucket.step % 2 == 0
        fixed = self._fixed(plan, bucket, RIGHT if even else LEFT)
        numel = matrices.left_numel if even else matrices.right_numel
        payload = fixed.new_empty(numel + plan.tail_numel)
        own, tail = payload.split((numel, plan.tail_numel))
        raw, residual, total = bucket.raw, bucket.residual, work_buffer(bucket)
        if even:
            multiply_right(matrices, raw, fixed, own, residual=residual, total=total)
            plan.take_tail(raw, residual, total, tail)
        else:
            if residual is not None:
                torch.add(raw, residual, out=total)
            elif total is not raw:
                total.copy_(raw)
            multiply_left(matrices, total, fixed, own)
            plan.take_tail(total, None, total, tail)
        sent = own if bucket.unsent is None else own.clone()
        request = AllReduce(payload)
        payload = yield request
        new, tail = payload.split((numel, plan.tail_numel))
        finite = all_finite(payload)
        new.add_(nan_unless(finite))
        key, factors = (LEFT, plan.left_factors) if even else (RIGHT, plan.factors)
        self._kept(factors, bucket, key)  # what to go back to, should the step be bad
        bucket.memory.write(key, factors, new.clone())

        sent = sent if request.sent is None else request.sent[:numel]
        if bucket.unsent is not None:
            sent_tail = None if request.sent is None else request.sent[numel:]
            plan.keep_tail(total, sent_tail, bucket.unsent)
        left, right = (new, fixed) if even else (fixed, new)
        both = (sent, fixed) if even else (fixed, sent)
        output = bucket.output
        decode_low_rank(matrices, left, right, output, sent=both, total=total, unsent=bucket.unsent)
        plan.write_tail(tail, output)
        return Result(output, unsent=bucket.unsent, finite=finite & fits(output))

    def _fixed(self, plan: Plan, bucket: Bucket, key: str) -> Tensor:
        """The factor that the step before made, orthonormal; drawn where there is none."""
        factors = plan.factors if key == RIGHT else plan.left_factors
        fixed = self._kept(factors, bucket, key).to(bucket.wide_dtype, copy=True)
        orthonormalize(plan.right_as_left if key == RIGHT else plan.matrices, fixed)
        return fixed

    def _kept(self, factors: Layout, bucket: Bucket, key: str) -> Tensor:
        """The factors that are remembered; random where there are none, for zeros would stay."""

        def initial(name: str, shape: torch.Size) -> Tensor:
            return draw(f"{name}/{key}", shape, bucket, 0)

        device, dtype = bucket.raw.device, bucket.wide_dtype
        return bucket.memory.read(key, factors, device=device, dtype=dtype, initial=initial)

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key not in (LEFT, RIGHT):
            return "unknown"
        if len(parameter) < 2:
            return f"belongs to a matrix, the parameter has shape {tuple(parameter)}"
        length = as_matrix(parameter)[0 if key == LEFT else 1]
        if value.dim() != 2 or value.shape[1] != length:
            return f"has shape {tuple(value.shape)}, the parameter needs (rank, {length})"
        return None

    def initial_memory(self, name: str, shape: torch.Size, bucket: Bucket) -> dict[str, Tensor]:
        used = compressed_rank(shape, self.rank, self.min_compression_rate)
        if not used:
            return {}
        return {
            key: draw(f"{name}/{key}", (used, length), bucket, 0).to(bucket.wide_dtype)
            for key, length in zip((LEFT, RIGHT), as_matrix(shape), strict=True)
        }
