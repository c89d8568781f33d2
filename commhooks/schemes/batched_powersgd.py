"""Batched PowerSGD: one power iteration a step on the whole bucket as a square matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commhooks._memory import Layout
from commhooks._packed import dense_exchange
from commhooks._registry import register_scheme
from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange
from commhooks._work import poison
from commhooks.kernels import Matrices, all_finite, orthonormalize, unit_rows
from commhooks.schemes._low_rank import (
    check_rank,
    compute_dtype,
    draw,
    fits,
    fresh_factors,
    random_factors,
)
from ddp_core import AllReduce

__all__ = ["BatchedPowerSGD"]

KEY = "batched_powersgd.q"


@register_scheme("batched_powersgd")
@dataclass(frozen=True)
class BatchedPowerSGD(Scheme):
    """PowerSGD on the whole bucket as one square matrix: fewer bytes and calls, less accurate.

    The bucket, padded by zeros to a square of side ``ceil(sqrt(numel))``, is never copied or
    resized: the padding takes part in the formulas only.

    Biased: use with ``ErrorFeedback``. Payload: ``2 * rank * side`` entries per bucket; a bucket
    that is no larger than this travels as it is. If any value of any rank is not finite, the whole
    bucket arrives as NaN. The warm start belongs to the bucket: it begins anew when DDP or a
    resumed job forms others.

    Args:
        rank: 1 or 2, usually.
        warm_start: starts from the last step's Q.

    Example:
        >>> hook = register(ddp_model, ErrorFeedback(BatchedPowerSGD(rank=2)))

    Reference: ``batched_powerSGD_hook`` of PyTorch.
    """

    rank: int = 1
    warm_start: bool = True

    rounds = 2
    biased = True
    linear = True

    def __post_init__(self) -> None:
        check_rank(self, self.rank)

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.warm_start

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key != KEY:
            return "unknown"
        if not value.is_floating_point():
            return f"is of {value.dtype}, a factor is floating point"
        if value.dim() != 2 or not 0 < value.shape[0] <= value.shape[1]:
            return f"has shape {tuple(value.shape)}, needs (rank, side)"
        return None

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        side = math.isqrt(max(grad.numel() - 1, 0)) + 1
        rank = min(self.rank, side)
        if 2 * rank * side >= grad.numel():
            return (yield from dense_exchange(grad, ctx))
        grad = grad.to(compute_dtype(grad))
        factors = Layout(ctx.layout.names[:1], [(rank, side)])
        right, q = self._right_factor(factors, grad, ctx)

        parts = _square(grad, side)
        p = right.new_zeros(rank, side)
        for rows, part in parts:
            p[:, rows] = right[:, : part.shape[1]] @ part.mT
        p = yield AllReduce(p)
        finite = all_finite(p)
        orthonormalize(_factors(side, rank), p)

        q.zero_()
        for rows, part in parts:
            q[:, : part.shape[1]].addmm_(p[:, rows], part)
        own = q.clone() if ctx.keep_unsent else q
        second = AllReduce(q)
        q = yield second
        finite = finite & all_finite(q)
        q.add_(poison(finite))
        if self.warm_start:
            ctx.memory.write(KEY, factors, q.view(-1))

        if ctx.keep_unsent:
            own = own if second.sent is None else second.sent
            for rows, part in parts:
                part.addmm_(p[:, rows].mT, own[:, : part.shape[1]], alpha=-1)
        for rows, part in _square(ctx.output, side):
            part.copy_(p[:, rows].mT @ q[:, : part.shape[1]])
        unsent = grad if ctx.keep_unsent else None
        return Exchanged(ctx.output, unsent=unsent, finite=finite & fits(ctx.output))

    def _right_factor(self, factors: Layout, grad: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """The right factor (r, side) to start from, and a tensor for the new one."""
        shape, memory = factors.shapes[0], ctx.memory
        if not self.warm_start:
            flat = random_factors(factors, ctx, ctx.step, grad)
            return flat.view(shape), torch.empty_like(flat).view(shape)

        def initial(name: str, shape: torch.Size) -> Tensor:
            return draw(name, shape, ctx, 0)

        old = memory.read(KEY, factors, device=grad.device, dtype=grad.dtype, initial=initial).to(
            grad.dtype
        )

        right = old.clone().view(shape)
        fresh = fresh_factors(factors, ctx.seed, grad.device, grad.dtype)
        unit_rows(_factors(shape[1], shape[0]), right, fresh)
        return right, memory.scratch(KEY, factors, old).view(shape)


@lru_cache(maxsize=1024)
def _factors(side: int, rank: int) -> Matrices:
    """Of one square, whose factors are worked on alone."""
    return Matrices([(0, side, side, rank)])


def _square(flat: Tensor, side: int) -> list[tuple[slice, Tensor]]:
    """The rows of the square that hold entries, and views of them: full ones, and a short last."""
    rows, rest = divmod(flat.numel(), side)
    parts = [(slice(0, rows), flat[: rows * side].view(rows, side))]
    if rest:
        parts.append((slice(rows, rows + 1), flat[rows * side :].view(1, rest)))
    return parts
