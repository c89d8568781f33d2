"""Multiplies all matrices of a bucket with thin factors: the arithmetic of PowerSGD.

Factors are rank-major: the left factor of an n x m matrix has shape (r, n), the right one (r, m).
A thin operand whose last, fastest dimension is the rank costs MKL 3 to 26 times more. One call
handles all matrices of a bucket, and its tail: the entries that no matrix has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _tail
from ._low_rank_definition import expand_op, multiply_left_op, multiply_right_op, subtract_op
from ._matrices import Matrices, OnDevice, on_device, table_of
from ._tail import tail_table
from .runtime import cpu, cuda

__all__ = [
    "Matrices",
    "decode_low_rank",
    "expand_op",
    "multiply_left",
    "multiply_left_op",
    "multiply_right",
    "multiply_right_op",
    "subtract_low_rank",
    "subtract_op",
    "tail_table",
]

# Public functions -------------------------------------------------------------------------------


def multiply_right(
    matrices: Matrices,
    x: Tensor,
    right: Tensor,
    left: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    own: Tensor | None = None,
    tail: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes the left factors ``right @ M^T`` for each matrix M of ``x``, or of ``x + residual``.

    Kernels equal one another bit for bit. They differ from the definition, which sums in another
    order, by at most ``m * 2^-23`` times the sum of the magnitudes of the m products.

    Args:
        x: the bucket, contiguous: float32, float16, bfloat16, or float64 (without kernels).
        right: float32 (float64 for an ``x`` of float64), ``matrices.right_numel`` entries.
        left: same dtype, ``matrices.left_numel`` entries.
        residual: same dtype, as many entries as ``x``; requires ``total``.
        total: same dtype, as many entries as ``x``; receives ``x + residual`` where matrices and
            the tail lie. May be ``x`` or ``residual``.
        own: like ``left``, receives the same.
        tail: a table of :func:`tail_table`, and a tensor of the dtype of ``left``, as long as all
            its pieces together, which receives those of ``x + residual`` one after the other.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    # There is nothing to write then; kernels would copy the bucket onto itself.
    total = None if total is x and residual is None else total
    table = table_of("multiply_right", matrices)
    multiply_right_op(x, residual, total, table, right, left, own, *(tail or (None, None)))


def multiply_left(
    matrices: Matrices,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    own: Tensor | None = None,
    tail: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes the right factors ``left @ M`` of each matrix; otherwise as :func:`multiply_right`."""
    total = None if total is x and residual is None else total
    table = table_of("multiply_left", matrices)
    multiply_left_op(x, residual, total, table, left, right, own, *(tail or (None, None)))


def decode_low_rank(
    matrices: Matrices,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    *,
    finite: Tensor | None = None,
    tail: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes ``left^T @ right`` of each matrix to ``out``, and the tail to its places.

    Entries of no matrix and of no piece of the tail stay unchanged. Kernels sum in the order of the
    rows of the factors, so that all machines get the same bits.

    Args:
        left, right: float32 (float64 for an ``out`` of float64).
        out: float32, float16, bfloat16 or float64, contiguous.
        finite: one bool; where it is False, all entries of ``out`` in matrices become NaN.
        tail: a table of :func:`tail_table` and the tail, of the dtype of the factors.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    table = table_of("decode_low_rank", matrices)
    expand_op(left, right, table, out, finite, *(tail or (None, None)))


def subtract_low_rank(
    matrices: Matrices,
    total: Tensor,
    left: Tensor,
    right: Tensor,
    unsent: Tensor,
    *,
    tail: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """Writes ``total - left^T @ right`` of each matrix to ``unsent``: what these factors leave out.

    Args:
        total: float32 or float64, contiguous.
        left, right: the factors that this rank sent, of the same dtype.
        unsent: same dtype, as many entries as ``total``; may be ``total``.
        tail: a table of :func:`tail_table`, and what this rank sent of the tail, of the same dtype;
            None: all of it, as it is in ``total``, so that nothing is left.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    table = table_of("subtract_low_rank", matrices)
    subtract_op(total, table, left, right, unsent, *(tail or (None, None)))


# CPU kernels -----------------------------------------------------------------------------------


@multiply_right_op.kernel("cpu")
def _multiply_right_cpu(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    right: Tensor,
    left: Tensor,
    own: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    # All matrices in one call: a model has dozens, and a call of an op costs 6 to 18 microseconds.
    source = (cpu.DTYPES[x.dtype], table, len(table) - 1, x)
    cpu.call("multiply_right", *source, residual, total, right, left)
    _finish_cpu(x, residual, total, left, own, tails, tail)


@multiply_left_op.kernel("cpu")
def _multiply_left_cpu(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    left: Tensor,
    right: Tensor,
    own: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    source = (cpu.DTYPES[x.dtype], table, len(table) - 1, x)
    cpu.call("multiply_left", *source, residual, total, left, right)
    _finish_cpu(x, residual, total, right, own, tails, tail)


def _finish_cpu(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    factor: Tensor,
    own: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    if own is not None:
        own.copy_(factor)
    if tails is not None and tail is not None:
        source = (cpu.DTYPES[x.dtype], tails, len(tails) - 1, x)
        cpu.call("gather_tail", *source, residual, total, tail)


@expand_op.kernel("cpu")
def _expand_cpu(
    left: Tensor,
    right: Tensor,
    table: Tensor,
    out: Tensor,
    finite: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    dtype = cpu.DTYPES[out.dtype]
    cpu.call("expand", dtype, table, len(table) - 1, left, right, out, finite)
    if tails is not None and tail is not None:
        cpu.call("scatter_tail", dtype, tails, len(tails) - 1, tail, out)


@subtract_op.kernel("cpu")
def _subtract_cpu(
    total: Tensor,
    table: Tensor,
    left: Tensor,
    right: Tensor,
    unsent: Tensor,
    tails: Tensor | None,
    sent: Tensor | None,
) -> None:
    cpu.call("subtract_low_rank", table, len(table) - 1, total, left, right, unsent)
    if tails is not None:
        cpu.call("subtract_tail", tails, len(tails) - 1, total, sent, unsent)


# CUDA kernels ----------------------------------------------------------------------------------

# Threads of a block of the products. Many registers leave room for 16 to 24 warps on a
# multiprocessor, and a bucket of 25 MiB has 12 for each: small blocks spread them evenly.
_THREADS = 128


def _launch(
    like: Tensor, kernel: str, warps: int, arguments: tuple[Tensor | int | None, ...]
) -> None:
    name = f"{kernel}<{cuda.DTYPES[like.dtype]}>"
    cuda.launch("low_rank.cu", name, like.device, warps, arguments, threads=_THREADS)


@multiply_right_op.kernel("cuda")
def _multiply_right_cuda(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    right: Tensor,
    left: Tensor,
    own: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    # Partial sums go through memory, and a second launch adds them in their order. Atomic additions
    # would save it, but their order, and so the bits, would change from run to run.
    there = on_device(table, x.device)
    sums = torch.empty(there.block_sums, dtype=torch.float32, device=x.device)
    source = (there.table, there.matrices, there.block_tasks, x, residual, total, right, sums)
    _launch(x, "multiply_right", there.block_tasks, source)
    pieces = _tail.on_device(tails, x.device)
    added = (there.table, there.matrices, there.lefts, sums, left, own)
    warps = (there.lefts + pieces[2]) // 32 + 1
    _launch(x, "add_segments", warps, (*added, *pieces, x, residual, total, tail))


@multiply_left_op.kernel("cuda")
def _multiply_left_cuda(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    left: Tensor,
    right: Tensor,
    own: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    there = on_device(table, x.device)
    sums = torch.empty(there.chunk_sums, dtype=torch.float32, device=x.device)
    source = (there.table, there.matrices, there.chunk_tasks, x, residual, total, left, sums)
    _launch(x, "multiply_left", there.chunk_tasks, source)
    pieces = _tail.on_device(tails, x.device)
    added = (there.table, there.matrices, there.rights, sums, right, own)
    warps = (there.rights + pieces[2]) // 32 + 1
    _launch(x, "add_chunks", warps, (*added, *pieces, x, residual, total, tail))


@expand_op.kernel("cuda")
def _expand_cuda(
    left: Tensor,
    right: Tensor,
    table: Tensor,
    out: Tensor,
    finite: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    there, pieces = on_device(table, out.device), _tail.on_device(tails, out.device)
    source = (there.table, there.matrices, there.block_tasks, left, right)
    _launch(out, "expand", _tasks(there, pieces[2]), (*source, out, finite, *pieces, tail))


@subtract_op.kernel("cuda")
def _subtract_cuda(
    total: Tensor,
    table: Tensor,
    left: Tensor,
    right: Tensor,
    unsent: Tensor,
    tails: Tensor | None,
    sent: Tensor | None,
) -> None:
    there, pieces = on_device(table, total.device), _tail.on_device(tails, total.device)
    source = (there.table, there.matrices, there.block_tasks, total, left, right)
    arguments = (*source, unsent, *pieces, sent)
    warps = _tasks(there, pieces[2])
    cuda.launch(
        "low_rank.cu", "subtract_low_rank", total.device, warps, arguments, threads=_THREADS
    )


def _tasks(there: OnDevice, tail_numel: int) -> int:
    """Returns the number of tasks, each for a warp: pieces of matrices, and of the tail."""
    return there.block_tasks + tail_numel // 256 + 1  # kTask entries of the tail each
