"""Multiplies all matrices of a bucket with thin factors: the arithmetic of PowerSGD.

Factors are rank-major: the left factor of an n x m matrix has shape (r, n), the right one (r, m).
A thin operand whose last, fastest dimension is the rank costs MKL 3 to 26 times more. One call
handles all matrices of a bucket, and its tail: the entries that no matrix has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _tail
from ._low_rank_definition import expand_op, multiply_left_op, multiply_right_op
from ._matrices import Matrices, on_device, table_of
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
    sent: tuple[Tensor, Tensor] | None = None,
    total: Tensor | None = None,
    unsent: Tensor | None = None,
    finite: Tensor | None = None,
    tail: tuple[Tensor, Tensor] | None = None,
    sent_tail: Tensor | None = None,
) -> None:
    """Writes ``left^T @ right`` of each matrix to ``out``, and the tail to its places.

    In the same pass, ``unsent`` receives what the sent factors leave out of ``total``:
    ``total - sent[0]^T @ sent[1]``. Entries of no matrix and of no piece of the tail stay
    unchanged. Kernels sum in the order of the rows of the factors, so that all machines get the
    same bits.

    Args:
        left, right: float32 (float64 for an ``out`` of float64).
        out: float32, float16, bfloat16 or float64, contiguous.
        sent: the left and the right factors that this rank sent; required with ``unsent``.
        total, unsent: dtype of the factors, as many entries as ``out``; ``unsent`` requires
            ``total``. One of ``out`` and ``unsent`` may be ``total``.
        finite: one bool; where it is False, all entries of ``out`` in matrices become NaN.
        tail: a table of :func:`tail_table` and the tail, of the dtype of the factors.
        sent_tail: like the tail, what this rank sent of it. None: all of it, as it is in ``total``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    table = table_of("decode_low_rank", matrices)
    tails, received = tail or (None, None)
    if unsent is None:  # nobody asks what was sent
        expand_op(left, right, None, None, None, table, None, out, finite, tails, received, None)
        return
    if sent is None or total is None:
        raise ValueError("decode_low_rank(sent, total): needed for unsent")
    own_tail = sent_tail if tail else None
    expand_op(left, right, *sent, total, table, unsent, out, finite, tails, received, own_tail)


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
    sent_left: Tensor | None,
    sent_right: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    unsent: Tensor | None,
    out: Tensor,
    finite: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
    sent_tail: Tensor | None,
) -> None:
    dtype = cpu.DTYPES[out.dtype]
    source = (dtype, table, len(table) - 1, left, right)
    cpu.call("expand", *source, sent_left, sent_right, total, unsent, out, finite)
    if tails is not None and tail is not None:
        into = (sent_tail, total, unsent, out)
        cpu.call("scatter_tail", dtype, tails, len(tails) - 1, tail, *into)


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
    pieces = _tail.on_device(tails, tail, x.device)
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
    pieces = _tail.on_device(tails, tail, x.device)
    added = (there.table, there.matrices, there.rights, sums, right, own)
    warps = (there.rights + pieces[2]) // 32 + 1
    _launch(x, "add_chunks", warps, (*added, *pieces, x, residual, total, tail))


@expand_op.kernel("cuda")
def _expand_cuda(
    left: Tensor,
    right: Tensor,
    sent_left: Tensor | None,
    sent_right: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    unsent: Tensor | None,
    out: Tensor,
    finite: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
    sent_tail: Tensor | None,
) -> None:
    there = on_device(table, out.device)
    source = (there.table, there.matrices, there.block_tasks, left, right, sent_left, sent_right)
    pieces = _tail.on_device(tails, tail, out.device)
    warps = there.block_tasks + pieces[2] // 256 + 1  # kTask entries of the tail each
    arguments = (*source, total, unsent, out, finite, *pieces, tail, sent_tail)
    _launch(out, "expand", warps, arguments)
