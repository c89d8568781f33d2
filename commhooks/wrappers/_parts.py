"""Runs schemes over parts of a bucket, each of which has some of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._layout import Span
from commhooks.core._scheme import Scheme
from ddp_core import AllReduce, Collective, as_request
from ddp_core._torch import foreach_copy

__all__ = ["Part", "exchange_concurrently", "join_parts"]


class Part:
    """Runs one scheme over some parameters of a bucket, gathered into a bucket of their own.

    Args:
        positions: of these parameters in the bucket's layout.
    """

    def __init__(self, scheme: Scheme, bucket: Bucket, positions: Sequence[int]) -> None:
        layout = bucket.layout
        self.spans = [(layout.offsets[i], layout.offsets[i + 1]) for i in positions]
        # A copy: the parameters are not contiguous. The residual is in it; kernels do not add it.
        gradient = torch.cat([bucket.gradient[begin:end] for begin, end in self.spans])
        kept = bucket.unsent is not None
        shards = None if bucket.shards is None else _shards_of(self.spans, bucket.shards)
        output = gradient if shards is None else gradient[slice(*shards[bucket.rank])]
        self.bucket = bucket.replace(
            raw=gradient,
            residual=None,
            unsent=torch.empty_like(gradient, dtype=bucket.wide_dtype) if kept else None,
            output=torch.empty_like(output, dtype=bucket.output.dtype),
            layout=layout.pick(positions),
            shards=shards,
        )
        self.exchange = scheme.exchange(self.bucket)
        self.request: Collective | None = None
        self.result = Result(gradient)

    def advance(self, answer: Tensor | None) -> None:
        """Runs to the next request, or to the end."""
        try:
            yielded = next(self.exchange) if answer is None else self.exchange.send(answer)
            self.request = as_request(yielded)
        except StopIteration as stop:
            self.request, self.result = None, stop.value

    def write_back(self, bucket: Bucket) -> None:
        """Copies the mean, and what was not sent, to the parameters' places in the bucket."""
        if bucket.unsent is not None:
            self.result = self.bucket.with_unsent(self.result)
            assert self.result.unsent is not None
            everything = (0, bucket.raw.numel())
            self._write(self.result.unsent, everything, bucket.unsent, everything)
        here = self.bucket.own_slice.indices(self.bucket.raw.numel())[:2]
        there = bucket.own_slice.indices(bucket.raw.numel())[:2]
        self._write(self.result.mean.view(-1), here, bucket.output, there)

    def _write(self, flat: Tensor, here: Span, into: Tensor, there: Span) -> None:
        """Copies the entries that two ranges have in common.

        Args:
            flat, here: entries of the part, and which of its entries they are.
            into, there: entries of the bucket, and which of its entries they are.
        """
        targets, sources = [], []
        for (begin, end), offset in zip(self.spans, self.bucket.layout.offsets, strict=False):
            first, last = max(begin, there[0]), min(end, there[1])
            if first < last:
                shift = offset - begin - here[0]
                targets.append(into[first - there[0] : last - there[0]])
                sources.append(flat[first + shift : last + shift])
        if targets:  # together: on a GPU each by itself would be a launch
            foreach_copy(targets, sources)


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
    for part in parts:
        part.write_back(bucket)
    flags = [part.result.finite for part in parts if part.result.finite is not None]
    finite = torch.stack(flags).all() if len(flags) == len(parts) else None
    return Result(bucket.output, unsent=bucket.unsent, finite=finite)


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
