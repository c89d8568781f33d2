"""Schemes that send the gradient as it is, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks._registry import register_scheme
from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange
from commhooks.kernels import scaled_cast
from ddp_core import AllGather, AllReduce, AllToAll

__all__ = ["Dense", "Noop", "TwoPhaseCast"]


@register_scheme("none", "allreduce")
@dataclass(frozen=True)
class Dense(Scheme):
    """Averages the gradient by one all-reduce in its own dtype, bit-equal to plain DDP.

    Example:
        >>> hook = register(ddp_model, "none")
    """

    linear = True

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        request = AllReduce(grad.clone() if ctx.keep_unsent else grad)
        mean = yield request
        return Exchanged(mean, sent=request.sent)


@register_scheme("noop")
@dataclass(frozen=True)
class Noop(Scheme):
    """Returns the local gradient without any exchange: the step time no scheme can beat.

    For measuring headroom only; the ranks drift apart.
    """

    rounds = 0
    averages = False

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        return Exchanged(grad)
        yield


@dataclass(frozen=True)
class TwoPhaseCast(Scheme):
    """Averages with 16 bits on the wire and 32 in the sum.

    Each rank sums one share of the bucket: all-to-all of the cast gradient, sum in float32,
    all-gather of the cast mean. The error is two roundings, however many ranks there are; a
    16-bit ring sum rounds once a rank.

    Args:
        dtype: what travels, ``torch.float16`` or ``torch.bfloat16``.
    """

    dtype: torch.dtype = torch.bfloat16
    rounds = 2

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        ranks, numel = ctx.world_size, grad.numel()
        share = -(-numel // ranks)
        rows = torch.zeros(ranks * share, dtype=self.dtype, device=grad.device)
        # Divide before the cast: a float16 share of a large gradient would overflow.
        scaled_cast(grad, 1.0 / ranks, out=rows[:numel])
        sent = rows[:numel].to(grad.dtype).mul_(ranks) if ctx.keep_unsent else None
        received = yield AllToAll(rows.view(ranks, share))
        mean = received.float().sum(0).to(self.dtype)
        gathered = yield AllGather(mean)
        ctx.output.copy_(gathered.view(-1)[:numel])
        return Exchanged(ctx.output, sent=sent)
