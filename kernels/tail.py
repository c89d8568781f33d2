"""Gathers the entries of a bucket that no matrix has, and writes them back: the tail of a payload.

A table lists the pieces of the tail: an int64 row per piece with its begin in the bucket and its
place in the tail, and a last row with the end of the bucket's last piece and the tail's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ._matrices import _version_of
from .runtime import cpu, cuda
from .runtime.op import check, op

__all__ = ["gather_tail", "scatter_tail", "tail_table"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BUCKETS, _WORK = (*_DTYPES, torch.float64), (torch.float32, torch.float64)


def tail_table(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the table of pieces with these begins and ends, in increasing order.

    Raises:
        ValueError: a piece ends before it begins, or overlaps the one before.

    Example:
        >>> tail_table([(0, 3), (10, 12)]).tolist()
        [[0, 0], [10, 3], [12, 5]]
    """
    rows, place, last = [], 0, 0
    for begin, end in spans:
        if not last <= begin <= end:
            raise ValueError(f"tail_table(spans): increasing, without overlap, got {spans}")
        rows.append((begin, place))
        place, last = place + end - begin, end
    return torch.tensor([*rows, (last, place)], dtype=torch.int64, device="cpu")


def gather_tail(
    x: Tensor, tail: Tensor, table: Tensor, *, residual: Tensor | None, total: Tensor | None
) -> None:
    """Writes the pieces of ``x``, or of ``x + residual``, one after the other to ``tail``.

    Args:
        x: the bucket, contiguous: float32, float16, bfloat16, or float64 (without kernels).
        tail: float32 (float64 for an ``x`` of float64), as long as all pieces together.
        table: of :func:`tail_table`.
        residual: same dtype as ``tail``, as many entries as ``x``.
        total: same dtype, as many entries as ``x``; receives the pieces in their places. May be
            ``x`` or ``residual``.
    """
    gather_tail_op(x, residual, total, tail, table)


def scatter_tail(
    tail: Tensor,
    out: Tensor,
    table: Tensor,
    *,
    sent: Tensor | None,
    total: Tensor | None,
    unsent: Tensor | None,
) -> None:
    """Writes a tail to the pieces of ``out``, and ``total`` minus ``sent`` to those of ``unsent``.

    Args:
        tail, out, table: as for :func:`gather_tail`.
        sent: like ``tail``, what this rank has sent. None: all of ``total``.
        total: dtype of the tail, as many entries as ``out``; may be ``out``. Needed with ``sent``.
        unsent: dtype of the tail, as many entries as ``out``. None: nobody keeps it.
    """
    scatter_tail_op(tail, out, sent, total, unsent, table)


@op(
    "gather_tail(Tensor x, Tensor? residual, Tensor(a!)? total, Tensor(b!) tail, Tensor table)"
    " -> ()",
    same=[("x", "total"), ("residual", "total")],
)
def gather_tail_op(
    x: Tensor, residual: Tensor | None, total: Tensor | None, tail: Tensor, table: Tensor
) -> None:
    for here, there in _pieces(table):
        values = x[here].to(tail.dtype)
        if residual is not None:
            values = values + residual[here]
        tail[there] = values
        if total is not None:
            total[here] = values


@op(
    "scatter_tail(Tensor tail, Tensor(a!) out, Tensor? sent, Tensor? total, Tensor(b!)? unsent,"
    " Tensor table) -> ()",
    same=[("out", "total"), ("total", "unsent")],
)
def scatter_tail_op(
    tail: Tensor,
    out: Tensor,
    sent: Tensor | None,
    total: Tensor | None,
    unsent: Tensor | None,
    table: Tensor,
) -> None:
    for here, there in _pieces(table):
        if unsent is not None:  # before `out`, which may be `total`
            rest = 0.0 if sent is None or total is None else total[here] - sent[there]
            unsent[here] = rest
        out[here] = tail[there]


@lru_cache(maxsize=4096)  # one per bucket, by the tensor and the number of writes to it
def _spans_of(table: Tensor, version: int) -> tuple[tuple[slice, slice], ...] | None:
    """Returns the places of all pieces in the bucket and in the tail; None for no such table."""
    if table.dim() != 2 or not len(table) or table.shape[1] != 2 or not table.is_contiguous():
        return None
    rows = table.tolist()
    lengths = [after[1] - row[1] for row, after in pairwise(rows)]
    spans = [(row[0], row[0] + length) for row, length in zip(rows, lengths, strict=False)]
    try:
        same = torch.equal(tail_table(spans), table)
    except ValueError:
        return None
    if not same:
        return None
    return tuple(
        (slice(begin, end), slice(row[1], row[1] + end - begin))
        for (begin, end), row in zip(spans, rows, strict=False)
    )


def _pieces(table: Tensor) -> tuple[tuple[slice, slice], ...]:
    pieces = _spans_of(table, _version_of(table))
    assert pieces is not None, "checked"
    return pieces


# Checks of arguments --------------------------------------------------------------------------


@gather_tail_op.check
def _check_gather(
    x: Tensor, residual: Tensor | None, total: Tensor | None, tail: Tensor, table: Tensor
) -> None:
    _check("gather_tail", x, tail, table, residual=residual, total=total)


@scatter_tail_op.check
def _check_scatter(
    tail: Tensor,
    out: Tensor,
    sent: Tensor | None,
    total: Tensor | None,
    unsent: Tensor | None,
    table: Tensor,
) -> None:
    _check("scatter_tail", out, tail, table, total=total, unsent=unsent)
    if sent is not None:
        check("scatter_tail", "sent", sent, like=out, dtypes=(tail.dtype,), n=tail.numel())
        if total is None:
            raise ValueError("scatter_tail(total): needed with sent")


def _check(
    caller: str, bucket: Tensor, tail: Tensor, table: Tensor, **others: Tensor | None
) -> None:
    good = table.is_cpu and table.dtype == torch.int64
    if not good or _spans_of(table, _version_of(table)) is None:
        raise ValueError(
            f"{caller}(table): a table as tail_table makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    end, length = table[-1].tolist()
    check(caller, "x" if caller == "gather_tail" else "out", bucket, like=bucket, dtypes=_BUCKETS)
    if bucket.numel() < end:
        raise ValueError(f"{caller}: a bucket of {end} entries or more, got {bucket.numel()}")
    work = torch.float64 if bucket.dtype == torch.float64 else torch.float32
    check(caller, "tail", tail, like=bucket, dtypes=(work,), n=length)
    for name, tensor in others.items():
        if tensor is not None:
            check(caller, name, tensor, like=bucket, dtypes=(work,), n=bucket.numel())


@gather_tail_op.beyond_kernels
@scatter_tail_op.beyond_kernels
def _is_double(first: Tensor, *rest: Tensor | None) -> bool:
    # The checks have compared the other tensors with it.
    return first.dtype == torch.float64


# Kernels --------------------------------------------------------------------------------------


@gather_tail_op.kernel("cpu")
def _gather_cpu(
    x: Tensor, residual: Tensor | None, total: Tensor | None, tail: Tensor, table: Tensor
) -> None:
    cpu.call("gather_tail", cpu.DTYPES[x.dtype], table, len(table) - 1, x, residual, total, tail)


@gather_tail_op.kernel("cuda")
def _gather_cuda(
    x: Tensor, residual: Tensor | None, total: Tensor | None, tail: Tensor, table: Tensor
) -> None:
    arguments = (_on_device(table, x.device), len(table) - 1, x, residual, total, tail)
    kernel, warps = f"gather_tail<{cuda.DTYPES[x.dtype]}>", tail.numel() // 32 + 1
    cuda.launch("tail.cu", kernel, x.device, warps, arguments)


@scatter_tail_op.kernel("cpu")
def _scatter_cpu(
    tail: Tensor,
    out: Tensor,
    sent: Tensor | None,
    total: Tensor | None,
    unsent: Tensor | None,
    table: Tensor,
) -> None:
    source = (cpu.DTYPES[out.dtype], table, len(table) - 1, tail)
    cpu.call("scatter_tail", *source, sent, total, unsent, out)


@scatter_tail_op.kernel("cuda")
def _scatter_cuda(
    tail: Tensor,
    out: Tensor,
    sent: Tensor | None,
    total: Tensor | None,
    unsent: Tensor | None,
    table: Tensor,
) -> None:
    arguments = (_on_device(table, out.device), len(table) - 1, tail, sent, total, unsent, out)
    kernel, warps = f"scatter_tail<{cuda.DTYPES[out.dtype]}>", tail.numel() // 32 + 1
    cuda.launch("tail.cu", kernel, out.device, warps, arguments)


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    return _copied(table, _version_of(table), device)


@lru_cache(maxsize=4096)
def _copied(table: Tensor, version: int, device: torch.device) -> Tensor:
    return table.to(device)
