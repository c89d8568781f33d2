"""Sparse schemes: the largest entries of a bucket, or random ones that all ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks._packed import dense_exchange
from commhooks._registry import register_scheme
from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange
from commhooks._work import Work, poison
from commhooks.kernels import (
    all_finite,
    gather_random,
    random_places,
    scatter_add,
    scatter_random,
    top_k,
    top_k_sampled,
)
from ddp_core import AllGather, AllReduce

__all__ = ["RandomBlock", "RandomK", "TopK"]


def _check_ratio(scheme: Scheme, ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        name = type(scheme).__name__
        raise ValueError(
            f"{name}(ratio=...) is a share of the entries, 0 < ratio <= 1, got {ratio!r}"
        )


def _kept(ratio: float, n: int) -> int:
    return min(n, max(1, int(ratio * n)))


@register_scheme("topk")
@dataclass(frozen=True)
class TopK(Scheme):
    """Sends the entries of largest magnitude of a bucket, with their places; ranks add them up.

    Payload: 8 bytes per entry sent, gathered from every rank, so it pays below a ratio of about
    1 / ranks. NaN counts as largest: it is sent.

    Biased: use with ``ErrorFeedback``, which adds and keeps in the same pass.

    Args:
        ratio: share of the entries that is sent; at least one is.
        sampled: finds the threshold from a sample of the bucket: about as many entries, never more.

    Example:
        >>> hook = register(ddp_model, "topk", ratio=0.01)

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017.
    """

    ratio: float = 0.01
    sampled: bool = False

    biased = True
    adds_residual = True

    def __post_init__(self) -> None:
        _check_ratio(self, self.ratio)

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        n, world_size = grad.numel(), ctx.world_size
        k = _kept(self.ratio, n)
        if 4 * k * world_size >= n * grad.element_size():  # 8 k received from each, 2 n at most
            return (yield from dense_exchange(grad, ctx))
        work = Work(grad, ctx)
        payload = grad.new_empty(2, k, dtype=torch.int32)
        select = top_k_sampled if self.sampled else top_k
        values = payload[1].view(torch.float32)
        select(work.x, k, payload[0], values, residual=work.residual, left=work.left)
        gathered = yield AllGather(payload)
        mean = work.output(torch.float32).zero_()
        indices, values = gathered.transpose(0, 1).contiguous()
        scatter_add(indices, values.view(torch.float32), mean, factor=1.0 / world_size)
        return work.exchanged(mean)


@dataclass(frozen=True)
class _Agreed(Scheme):
    """Entries at places that every rank draws alike: nothing but values travels, in an all-reduce.

    Only some entries are looked at, so a value that is not finite anywhere makes the whole bucket
    arrive as NaN.
    """

    ratio: float = 0.01

    biased = True
    linear = True
    adds_residual = True

    def __post_init__(self) -> None:
        _check_ratio(self, self.ratio)

    def take(
        self, x: Tensor, k: int, ctx: Context, residual: Tensor | None, left: Tensor | None
    ) -> Tensor:
        """``k`` entries of ``x + residual``; the others go to ``left``."""
        raise NotImplementedError

    def put(self, values: Tensor, out: Tensor, ctx: Context) -> None:
        """Writes them to their places, and zeros elsewhere."""
        raise NotImplementedError

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        n = grad.numel()
        if not n:
            return (yield from dense_exchange(grad, ctx))
        # Sums of float64 stay in float64: the mean of what is sent is what the mean gradient sends.
        exact = grad.dtype == torch.float64
        x = ctx.corrected(grad) if exact else grad
        residual, left = None if exact else ctx.residual, ctx.unsent
        if ctx.keep_unsent and left is None:
            left = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        values = self.take(x, _kept(self.ratio, n), ctx, residual, left)
        finite = all_finite(x) if left is None else all_finite(left) & all_finite(values)
        values.add_(poison(finite))
        own = values if left is None else values.clone()
        request = AllReduce(values)
        values = yield request
        if left is not None and request.sent is not None:  # rounded on the way
            lost = torch.empty_like(left)
            self.put(own - request.sent, lost, ctx)
            left.add_(lost)
        finite = all_finite(values)
        mean = ctx.output
        if mean.dtype != values.dtype:
            mean = torch.empty_like(mean, dtype=values.dtype)
        self.put(values, mean, ctx)
        if finite.device.type != "cpu" or not finite:
            mean.add_(poison(finite))
        if mean.dtype != ctx.output.dtype:
            mean = ctx.output.copy_(mean)
        return Exchanged(mean, unsent=left, finite=finite)


@register_scheme("random_k")
@dataclass(frozen=True)
class RandomK(_Agreed):
    """Sends random entries of a bucket; all ranks draw the same, so no place is sent.

    One entry of each of k equal stretches. Biased: use with ``ErrorFeedback``; what was not drawn
    waits for its turn. Payload: 4 bytes per entry sent.

    Args:
        ratio: share of the entries that is sent; at least one is.

    Reference: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018.
    """

    def take(
        self, x: Tensor, k: int, ctx: Context, residual: Tensor | None, left: Tensor | None
    ) -> Tensor:
        if x.dtype == torch.float64:
            return _take_at(self._places(x.numel(), k, ctx, x.device), x, left)
        values = x.new_empty(k, dtype=torch.float32)
        stream = ctx.random("random_k", shared=True)
        gather_random(x, values, stream, residual=residual, left=left)
        return values

    def put(self, values: Tensor, out: Tensor, ctx: Context) -> None:
        if out.dtype == torch.float64:
            places = self._places(out.numel(), values.numel(), ctx, out.device)
            out.zero_().index_copy_(0, places, values)
        else:
            scatter_random(values, out, ctx.random("random_k", shared=True))

    def _places(self, n: int, k: int, ctx: Context, device: torch.device) -> Tensor:
        stream = ctx.random("random_k", shared=True)
        return random_places(n, k, ctx.step, stream.seed, stream.number, device=device)


@register_scheme("random_block")
@dataclass(frozen=True)
class RandomBlock(_Agreed):
    """Sends one contiguous stretch of a bucket, at a random place that all ranks draw alike.

    The cheapest scheme there is: no selection, no places. Biased: use with ``ErrorFeedback``.

    Args:
        ratio: share of the entries that is sent; at least one is.

    Reference: Xu et al., GRACE, 2021 (as a baseline).
    """

    def take(
        self, x: Tensor, k: int, ctx: Context, residual: Tensor | None, left: Tensor | None
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        source = x if left is None else left
        if left is not None:
            left.copy_(x) if residual is None else torch.add(x, residual, out=left)
        pieces = [source[part] for part in self._parts(x.numel(), k, ctx)]
        values = torch.cat(pieces).to(wide)
        if left is not None:
            for piece in pieces:
                piece.zero_()
        return values

    def put(self, values: Tensor, out: Tensor, ctx: Context) -> None:
        out.zero_()
        parts = self._parts(out.numel(), values.numel(), ctx)
        sizes = [part.stop - part.start for part in parts]
        for part, piece in zip(parts, values.split(sizes), strict=True):
            out[part] = piece

    def _parts(self, n: int, k: int, ctx: Context) -> list[slice]:
        """The stretch, in two parts where it goes over the end."""
        generator = ctx.generator(f"{ctx.layout.names[0]}/random_block", shared=True)
        begin = int(torch.randint(n, (), generator=generator))
        over = max(0, begin + k - n)
        return [slice(begin, begin + k - over), *([slice(0, over)] if over else [])]


def _take_at(places: Tensor, x: Tensor, left: Tensor | None) -> Tensor:
    values = x[places]
    if left is not None:
        left.copy_(x).index_fill_(0, places, 0.0)
    return values
