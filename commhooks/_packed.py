"""Packed codecs: payloads of a fixed number of bytes, and the two ways to exchange them.

- **all-gather**: every rank gets every payload; one rounding, ``n - 1`` payloads received.
- **two-phase**: rank r gets everyone's payload of shard r, sums it in float32, packs the mean again
  and sends it to all; two roundings, two payloads received, however many ranks there are.

Never is a partial sum rounded again on a ring: the error would grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from commhooks._scheme import Context, Exchanged, Scheme, SchemeExchange
from commhooks._work import Work
from commhooks.kernels import Stream
from ddp_core import AllGather, AllReduce, AllToAll, Collective

__all__ = ["Draw", "PackedCodec", "Pattern", "check_pattern", "dense_exchange"]

Pattern = Literal["two_phase", "all_gather"]
Rounds = Generator[Collective, Tensor, None]


class Draw(NamedTuple):
    """Random streams of one payload.

    Attributes:
        noise: for stochastic rounding; of this rank and phase alone.
        shared: the same on every rank and in both phases.
        ctx: for other draws, from ``ctx.generator``.
    """

    noise: Stream
    shared: Stream
    ctx: Context


def dense_exchange(grad: Tensor, ctx: Context) -> SchemeExchange:
    """One all-reduce of a bucket that does not pay to compress."""
    grad = ctx.corrected(grad)
    request = AllReduce(grad.clone() if ctx.keep_unsent else grad)
    mean = yield request
    mean = mean if mean.dtype == ctx.output.dtype else ctx.output.copy_(mean)
    if ctx.unsent is None:
        return Exchanged(mean, sent=request.sent)
    unsent = ctx.unsent.zero_() if request.sent is None else ctx.unsent.sub_(request.sent)
    return Exchanged(mean, unsent=unsent)


def check_pattern(owner: object, pattern: str) -> None:
    if pattern not in ("two_phase", "all_gather"):
        raise ValueError(
            f"{type(owner).__name__}(pattern=...) is 'two_phase' or 'all_gather', got {pattern!r}"
        )


class _Shard(NamedTuple):
    """The part of a bucket that one rank sums, and the bytes of its payload."""

    begin: int
    end: int
    nbytes: int


class PackedCodec(Scheme):
    """A codec whose payload of n entries is a fixed number of bytes, a multiple of 16.

    Subclasses implement ``payload_bytes``, ``pack`` and ``unpack``; ``repack`` where one pass does
    better. Entries are float32 (float64 gradients are rounded; feedback gets the difference).

    Attributes:
        pattern: "two_phase" or "all_gather".
        unit: entries that cannot be divided; shards are multiples of it.
    """

    pattern: Pattern = "two_phase"
    unit: int = 1
    adds_residual = True

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return 2 if self.pattern == "two_phase" else 1

    def payload_bytes(self, n: int) -> int:
        """Bytes of the payload of ``n`` entries."""
        raise NotImplementedError

    def pack(
        self,
        x: Tensor,
        payload: Tensor,
        draw: Draw,
        residual: Tensor | None = None,
        left: Tensor | None = None,
    ) -> None:
        """Writes the payload of ``x``, or of ``x + residual``, and to ``left`` what it leaves out.

        Args:
            x: float32, float16 or bfloat16, flat.
            payload: uint8, ``payload_bytes(x.numel())`` of them.
            residual, left: float32, as many entries as ``x``.
        """
        raise NotImplementedError

    def unpack(self, payloads: Tensor, out: Tensor, draw: Draw, factor: float) -> None:
        """Writes the sum of what the rows of ``payloads`` stand for, times ``factor``."""
        raise NotImplementedError

    def repack(
        self,
        payloads: Tensor,
        payload: Tensor,
        n: int,
        draw: Draw,
        factor: float,
        left: Tensor | None = None,
    ) -> None:
        """``unpack``, then ``pack``: the middle of the two-phase exchange."""
        total = torch.empty(n, dtype=torch.float32, device=payload.device)
        self.unpack(payloads, total, draw, factor)
        self.pack(total, payload, draw, left=left)

    # ---- how payloads travel

    def exchange(self, grad: Tensor, ctx: Context) -> SchemeExchange:
        n, world_size = grad.numel(), ctx.world_size
        shards = self._shards(n, world_size if self.pattern == "two_phase" else 1)
        if len(shards) * shards[0].nbytes >= n * grad.element_size():
            return (yield from dense_exchange(grad, ctx))
        work = Work(grad, ctx)
        out = work.output()
        if self.pattern == "two_phase":
            yield from self._two_phase(work, out, shards, ctx)
        else:
            yield from self._all_gather(work, out, ctx)
        return work.exchanged(out)

    def _shards(self, n: int, count: int) -> list[_Shard]:
        """``count`` equal shards, multiples of the unit; the last ones may be short or empty."""
        each = -(-n // (count * self.unit)) * self.unit
        spans = [(min(i * each, n), min((i + 1) * each, n)) for i in range(count)]
        return [_Shard(begin, end, self.payload_bytes(end - begin)) for begin, end in spans]

    def _all_gather(self, work: Work, out: Tensor, ctx: Context) -> Rounds:
        payload = out.new_empty(self.payload_bytes(out.numel()), dtype=torch.uint8)
        draw = _draw(ctx, 0, "worker")
        self.pack(work.x, payload, draw, work.residual, work.left)
        gathered = yield AllGather(payload)
        self.unpack(gathered, out, draw, 1.0 / ctx.world_size)

    def _two_phase(self, work: Work, out: Tensor, shards: list[_Shard], ctx: Context) -> Rounds:
        x, left = work.x, work.left
        sent = x.new_zeros(len(shards), shards[0].nbytes, dtype=torch.uint8)
        draws = [_draw(ctx, r, "worker") for r in range(len(shards))]
        for (begin, end, nbytes), row, draw in zip(shards, sent, draws, strict=True):
            part = slice(begin, end)
            rest, into = (None if one is None else one[part] for one in (work.residual, left))
            if begin < end:
                self.pack(x[part], row[:nbytes], draw, rest, into)
        received = yield AllToAll(sent)

        begin, end, nbytes = shards[ctx.rank]
        again = x.new_zeros(shards[0].nbytes, dtype=torch.uint8)
        if begin < end:
            lost = None if left is None else torch.empty_like(left[begin:end])
            rows = received[:, :nbytes].contiguous()
            factor, draw = 1.0 / ctx.world_size, _draw(ctx, ctx.rank, "server")
            self.repack(rows, again[:nbytes], end - begin, draw, factor, lost)
            if left is not None and lost is not None:
                # What the mean lost is this rank's to send: as n times as much of its own share.
                left[begin:end].add_(lost, alpha=float(ctx.world_size))
        gathered = yield AllGather(again)
        for (begin, end, nbytes), row, draw in zip(shards, gathered, draws, strict=True):
            if begin < end:
                self.unpack(row[None, :nbytes], out[begin:end], draw, 1.0)


def _draw(ctx: Context, shard: int, phase: str) -> Draw:
    noise = ctx.random(f"{phase}/{shard}", shared=False)
    return Draw(noise, ctx.random(f"{shard}", shared=True), ctx.part(f"{phase}/{shard}"))
