"""Packs signs as votes, one bit per entry, and counts the votes of several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .blockwise import as_messages
from .levels import even_rows
from .runtime import cpu, cuda
from .runtime.arguments import check_whole
from .runtime.op import FLOATS, Entries, op

__all__ = ["count_votes", "pack_votes", "vote_bytes"]

_SHARD = range(2**56)  # entries


def vote_bytes(n: int) -> int:
    """Returns the number of bytes of the votes of ``n`` entries, a multiple of 16."""
    return -(-(-(-n // 8) + 1) // 16) * 16


def pack_votes(x: Tensor, payload: Tensor, *, shard: int | None = None) -> None:
    """Writes bit i % 8 of byte i // 8: whether entry i is 0 or more.

    The last byte is 1 if some entry is not finite, the bytes before it are zero.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        payload: uint8, ``vote_bytes(shard)`` bytes, or a matrix with a row per shard.
        shard: entries per row, a multiple of 8; the last rows may be short or empty. None: all.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    pack_votes_op(x, payload, x.numel() if shard is None else shard)


def count_votes(payloads: Tensor, out: Tensor, scale: float, *, shard: int | None = None) -> None:
    """Writes ``scale`` where half of the votes or more are set, else ``-scale``.

    All entries of a row are NaN if some payload says that its entries are not all finite.

    Args:
        payloads: uint8, shape (n, bytes), or (n, rows, bytes) with ``shard``.
        out: float32, float16 or bfloat16, contiguous.
        scale: magnitude of the results.
        shard: entries per row, see :func:`pack_votes`.
    """
    count_votes_op(payloads, out, scale, out.numel() if shard is None else shard)


@op(
    "pack_votes(Tensor x, Tensor(a!) payload, int shard) -> ()",
    takes={"x": Entries(FLOATS), "payload": Entries(torch.uint8), "shard": _SHARD},
)
def pack_votes_op(x: Tensor, payload: Tensor, shard: int) -> None:
    rows = payload.view(-1, payload.shape[-1]).zero_()
    for row, begin, end in even_rows(x.numel(), shard, len(rows)):
        part = x.view(-1)[begin:end]
        bits = pad((part >= 0).to(torch.uint8), (0, -part.numel() % 8)).view(-1, 8)
        # copy_ narrows the sum of a byte's bits, which is at most 255, from int64 to uint8.
        rows[row, : len(bits)].copy_((bits << _places(x.device)).sum(1))
        rows[row, -1] = (~part.isfinite().all()).to(torch.uint8)


@op(
    "count_votes(Tensor payloads, Tensor(a!) out, float scale, int shard) -> ()",
    takes={"out": Entries(FLOATS), "payloads": Entries(torch.uint8), "shard": _SHARD},
)
def count_votes_op(payloads: Tensor, out: Tensor, scale: float, shard: int) -> None:
    messages = as_messages(payloads)
    for row, begin, end in even_rows(out.numel(), shard, messages.shape[1]):
        votes = messages[:, row, : -(-(end - begin) // 8), None] >> _places(out.device) & 1
        half = 2 * votes.sum(0).view(-1)[: end - begin] >= len(messages)
        bad = (messages[:, row, -1] != 0).any()
        result = torch.where(half, scale, -scale).masked_fill_(bad, torch.nan)
        out.view(-1)[begin:end] = result


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)  # uint8, so that shifts stay uint8


# Checks of arguments -------------------------------------------------------------------------


@pack_votes_op.check
def _check_pack(x: Tensor, payload: Tensor, shard: int) -> None:
    _check("pack_votes", "payload", payload, 1, x.numel(), shard)


@count_votes_op.check
def _check_count(payloads: Tensor, out: Tensor, shard: int) -> None:
    _check("count_votes", "payloads", payloads, 2, out.numel(), shard)


def _check(caller: str, name: str, payload: Tensor, least: int, n: int, shard: int) -> None:
    if not least <= payload.dim() <= least + 1 or not payload.shape[0]:
        raise ValueError(f"{caller}({name}): shape (..., bytes), got {tuple(payload.shape)}")
    rows = payload.shape[-2] if payload.dim() > least else 1
    check_whole(caller, f"{name}, rows", rows, 1, 2**16)  # a grid's second dimension
    if rows * shard < n or (n > shard and shard % 8):
        raise ValueError(f"{caller}(shard): a multiple of 8, {n} entries in {rows}, got {shard}")
    if payload.shape[-1] != vote_bytes(shard):
        raise ValueError(
            f"{caller}({name}): {vote_bytes(shard)} bytes for {shard} entries, "
            f"got {payload.shape[-1]}"
        )


def rows_in(payload: Tensor) -> int:
    """Returns the number of payloads of a message: one, if it is no matrix."""
    return payload.shape[-2] if payload.dim() > 1 else 1


# Kernels --------------------------------------------------------------------------------------


@pack_votes_op.kernel("cpu")
def _pack_cpu(x: Tensor, payload: Tensor, shard: int) -> None:
    rows = (rows_in(payload), payload.shape[-1], payload)
    cpu.call("pack_votes", cpu.DTYPES[x.dtype], x, x.numel(), shard, *rows)


@pack_votes_op.kernel("cuda")
def _pack_cuda(x: Tensor, payload: Tensor, shard: int) -> None:
    payload.zero_()  # warps only ever write that an entry is not finite, so they need no order
    arguments = (x, x.numel(), shard, payload.shape[-1], payload)
    name, warps = f"pack_votes<{cuda.DTYPES[x.dtype]}>", shard // 256 + 1
    cuda.launch("votes.cu", name, x.device, warps, arguments, rows_in(payload))


@count_votes_op.kernel("cpu")
def _count_cpu(payloads: Tensor, out: Tensor, scale: float, shard: int) -> None:
    arguments = (*_source(payloads), out.numel(), shard, rows_in(payloads[0]), scale, out)
    cpu.call("count_votes", cpu.DTYPES[out.dtype], *arguments)


@count_votes_op.kernel("cuda")
def _count_cuda(payloads: Tensor, out: Tensor, scale: float, shard: int) -> None:
    arguments = (*_source(payloads), out.numel(), shard, scale, out)
    name, warps = f"count_votes<{cuda.DTYPES[out.dtype]}>", shard // 256 + 1
    cuda.launch("votes.cu", name, out.device, warps, arguments, rows_in(payloads[0]))


def _source(payloads: Tensor) -> tuple[Any, ...]:
    return (payloads, payloads.shape[0], payloads.stride(0), payloads.shape[-1])
