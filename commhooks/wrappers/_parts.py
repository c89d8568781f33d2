"""Runs schemes over parts of a bucket, each of which has some of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._layout import Layout, Span
from commhooks.core._scheme import Scheme, checked_result
from ddp_core import AllReduce, Collective, as_request
from ddp_core._torch import foreach_copy

__all__ = ["Part", "exchange_concurrently", "join_parts", "parts_of"]


Copy = tuple[Tensor, Tensor]  # target and source


class Part:
    """Runs one scheme over some parameters of a bucket, gathered into a bucket of their own.

    Args:
        positions: of these parameters in the bucket's layout.
        gradient: their gradients, one after the other, the residual included.
    """

    def __init__(
        self, scheme: Scheme, bucket: Bucket, positions: Sequence[int], gradient: Tensor
    ) -> None:
        layout = bucket.layout
        self.spans = _spans(layout, positions)
        has_unsent = bucket.unsent is not None
        shards = None if bucket.shards is None else _shards_of(self.spans, bucket.shards)
        output = gradient if shards is None else gradient[slice(*shards[bucket.rank])]
        self.bucket = bucket.replace(
            raw=gradient,
            residual=None,
            unsent=torch.empty_like(gradient, dtype=bucket.wide_dtype) if has_unsent else None,
            output=torch.empty_like(output, dtype=bucket.output.dtype),
            layout=layout.pick(positions),
            shards=shards,
        )
        self.scheme, self.exchange = scheme, scheme.exchange(self.bucket)
        self.request: Collective | None = None
        self.result = Result(gradient)

    def advance(self, answer: Tensor | None) -> None:
        """Runs to the next request, or to the end."""
        try:
            yielded = next(self.exchange) if answer is None else self.exchange.send(answer)
            self.request = as_request(yielded)
        except StopIteration as stop:
            self.request, self.result = None, checked_result(self.scheme, stop.value)

    def unsent_copies(self, bucket: Bucket) -> list[Copy]:
        """Returns the copies of what was not sent to the parameters' places in the bucket."""
        assert bucket.unsent is not None
        self.result = self.bucket.with_unsent(self.result)
        assert self.result.unsent is not None
        everything = (0, bucket.raw.numel())
        return self._copies(self.result.unsent, everything, bucket.unsent, everything)

    def mean_copies(self, bucket: Bucket) -> list[Copy]:
        """Returns the copies of the mean to the parameters' places in the bucket."""
        here = self.bucket.own_slice.indices(self.bucket.raw.numel())[:2]
        there = bucket.own_slice.indices(bucket.raw.numel())[:2]
        return self._copies(self.result.mean.view(-1), here, bucket.output, there)

    def _copies(self, flat: Tensor, here: Span, into: Tensor, there: Span) -> list[Copy]:
        """Returns target and source of the entries that two ranges have in common.

        Args:
            flat, here: entries of the part, and which of its entries they are.
            into, there: entries of the bucket, and which of its entries they are.
        """
        copies = []
        for (begin, end), offset in zip(self.spans, self.bucket.layout.offsets, strict=False):
            first, last = max(begin, there[0]), min(end, there[1])
            if first < last:
                shift = offset - begin - here[0]
                target = into[first - there[0] : last - there[0]]
                copies.append((target, flat[first + shift : last + shift]))
        return copies


def parts_of(bucket: Bucket, chosen: Sequence[tuple[Scheme, Sequence[int]]]) -> list[Part]:
    """Divides a bucket into parts, given the scheme and the positions of each."""
    # A copy: the parameters are not contiguous. The residual is in it; kernels do not add it.
    gradient, spans = bucket.gradient, [_spans(bucket.layout, where) for _, where in chosen]
    joined = torch.cat([gradient[begin:end] for some in spans for begin, end in some])
    pieces = joined.split([sum(end - begin for begin, end in some) for some in spans])
    return [
        Part(scheme, bucket, positions, piece)
        for (scheme, positions), piece in zip(chosen, pieces, strict=True)
    ]


def _spans(layout: Layout, positions: Sequence[int]) -> list[Span]:
    return [(layout.offsets[i], layout.offsets[i + 1]) for i in positions]


def _shards_of(spans: Sequence[Span], shards: Sequence[Span]) -> Sequence[Span] | None:
    """Returns the shards of a part, as entries of the part.

    None if the first is not the longest, as schemes need: every rank then takes the whole mean.
    """
    lengths, rank = [0] * len(shards), 0
    for begin, end in spans:
        while begin < end:
            if begin >= shards[rank][1]:
                rank += 1
                continue
            last = min(end, shards[rank][1])
            lengths[rank] += last - begin
            begin = last
    return tuple(pairwise(accumulate(lengths, initial=0))) if lengths[0] == max(lengths) else None


def join_parts(parts: Sequence[Part], bucket: Bucket) -> Result:
    """Joins the results of all parts of a bucket, once they have been exchanged."""
    # Together: on a GPU each copy by itself would be a launch.
    if bucket.unsent is not None:
        _copy([copy for part in parts for copy in part.unsent_copies(bucket)])
    _copy([copy for part in parts for copy in part.mean_copies(bucket)])
    flags = [part.result.finite for part in parts if part.result.finite is not None]
    finite = torch.stack(flags).all() if len(flags) == len(parts) else None
    return Result(bucket.output, unsent=bucket.unsent, finite=finite)


def _copy(copies: Sequence[Copy]) -> None:
    if copies:
        foreach_copy([target for target, _ in copies], [source for _, source in copies])


def exchange_concurrently(parts: Sequence[Part]) -> SchemeExchange:
    """Runs the exchanges of all parts together; merges all-reduces of equal operation and dtype.

    Every rank has the same parts in the same order, so all ranks merge the same requests.
    """
    for part in parts:
        part.advance(None)
    while waiting := [part for part in parts if part.request is not None]:
        first = waiting[0].request
        assert first is not None
        # Gathered payloads are not merged: theirs would be rows of different schemes.
        together = [part for part in waiting if _mergeable(first, part.request)] or waiting[:1]
        if len(together) == 1:
            together[0].advance((yield first))
            continue
        requests = [part.request for part in together if part.request is not None]
        merged = first.like(torch.cat([request.tensor.view(-1) for request in requests]))
        arrived = yield merged
        sizes = [request.tensor.numel() for request in requests]
        # The values that a cast around this wrapper rounded, for the feedback inside each part.
        shares = merged.sent.split(sizes) if merged.sent is not None else [None] * len(sizes)
        for part, request, piece, share in zip(
            together, requests, arrived.split(sizes), shares, strict=True
        ):
            request.sent = None if share is None else share.view(request.tensor.shape)
            part.advance(request.tensor.copy_(piece.view(request.tensor.shape)))
    return parts[0].result


def _mergeable(first: Collective, other: Collective | None) -> bool:
    return (
        isinstance(first, AllReduce)
        and isinstance(other, AllReduce)
        and (first.op, first.tensor.dtype) == (other.op, other.tensor.dtype)
    )
