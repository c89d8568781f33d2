"""ACP-SGD: low-rank gradients in one collective a step, left and right factors in turn."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks._memory import Layout
from commhooks._packed import dense_exchange
from commhooks._registry import register_scheme
from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange
from commhooks._work import poison
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
    compute_dtype,
    draw,
    fits,
    work_buffers,
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
    adds_residual = True

    def __post_init__(self) -> None:
        check_rank(self, self.rank)
        check_rate(self, self.min_compression_rate)

    def bucket_group(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Hashable:
        return bool(compressed_rank(shape, self.rank, self.min_compression_rate))

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        plan = plan_bucket(ctx.layout, self.rank, self.min_compression_rate)
        matrices = plan.matrices
        if not len(matrices):
            return (yield from dense_exchange(grad, ctx))
        even = ctx.step % 2 == 0
        fixed = self._fixed(plan, grad, ctx, RIGHT if even else LEFT)
        numel = matrices.left_numel if even else matrices.right_numel
        payload = fixed.new_empty(numel + plan.tail_numel)
        own, tail = payload.split((numel, plan.tail_numel))
        total, unsent = work_buffers(grad, ctx)
        if even:
            multiply_right(matrices, grad, fixed, own, residual=ctx.residual, total=total)
            plan.take_tail(grad, ctx.residual, total, tail)
        else:
            if ctx.residual is not None:
                torch.add(grad, ctx.residual, out=total)
            elif total is not grad:
                total.copy_(grad)
            multiply_left(matrices, total, fixed, own)
            plan.take_tail(total, None, total, tail)
        sent = own.clone() if ctx.keep_unsent else own
        request = AllReduce(payload)
        payload = yield request
        new, tail = payload.split((numel, plan.tail_numel))
        finite = all_finite(payload)
        new.add_(poison(finite))
        key, factors = (LEFT, plan.left_factors) if even else (RIGHT, plan.factors)
        self._kept(factors, grad, ctx, key)  # what to go back to, should the step be bad
        ctx.memory.write(key, factors, new.clone())

        sent = sent if request.sent is None else request.sent[:numel]
        if unsent is not None:
            plan.keep_tail(total, None if request.sent is None else request.sent[numel:], unsent)
        left, right = (new, fixed) if even else (fixed, new)
        both = (sent, fixed) if even else (fixed, sent)
        decode_low_rank(matrices, left, right, ctx.output, sent=both, total=total, unsent=unsent)
        plan.write_tail(tail, ctx.output)
        return Exchanged(ctx.output, unsent=unsent, finite=finite & fits(ctx.output))

    def _fixed(self, plan: Plan, grad: Tensor, ctx: Context, key: str) -> Tensor:
        """The factor that the step before made, orthonormal; drawn where there is none."""
        factors = plan.factors if key == RIGHT else plan.left_factors
        fixed = self._kept(factors, grad, ctx, key).to(compute_dtype(grad), copy=True)
        orthonormalize(plan.right_as_left if key == RIGHT else plan.matrices, fixed)
        return fixed

    def _kept(self, factors: Layout, grad: Tensor, ctx: Context, key: str) -> Tensor:
        """The factors that are remembered; random where there are none, for zeros would stay."""

        def initial(name: str, shape: torch.Size) -> Tensor:
            return draw(f"{name}/{key}", shape, ctx, 0)

        dtype = compute_dtype(grad)
        return ctx.memory.read(key, factors, device=grad.device, dtype=dtype, initial=initial)

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key not in (LEFT, RIGHT):
            return "unknown"
        if len(parameter) < 2:
            return f"belongs to a matrix, the parameter has shape {tuple(parameter)}"
        length = as_matrix(parameter)[0 if key == LEFT else 1]
        if value.dim() != 2 or value.shape[1] != length:
            return f"has shape {tuple(value.shape)}, the parameter needs (rank, {length})"
        return None

    def initial_memory(self, name: str, shape: torch.Size, ctx: Context) -> dict[str, Tensor]:
        used = compressed_rank(shape, self.rank, self.min_compression_rate)
        if not used:
            return {}
        dtype = compute_dtype(ctx.output)
        return {
            key: draw(f"{name}/{key}", (used, length), ctx, 0).to(dtype)
            for key, length in zip((LEFT, RIGHT), as_matrix(shape), strict=True)
        }
