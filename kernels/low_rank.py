"""Multiplies all matrices of a bucket with thin factors: the arithmetic of PowerSGD.

Factors are rank-major: the left factor of an n x m matrix has shape (r, n), the right one (r, m).
A thin operand whose last, fastest dimension is the rank costs MKL 3 to 26 times more. One call
handles all matrices of a bucket.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._low_rank_definition import (
    expand_op,
    multiply_left_op,
    multiply_right_op,
    orthonormalize_op,
    unit_rows_op,
)
from ._matrices import Matrices, on_device
from .runtime import cpu, cuda

__all__ = [
    "Matrices",
    "decode_low_rank",
    "expand_op",
    "multiply_left",
    "multiply_left_op",
    "multiply_right",
    "multiply_right_op",
    "orthonormalize",
    "orthonormalize_op",
    "unit_rows",
    "unit_rows_op",
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
) -> None:
    """Writes the left factors ``right @ M^T`` for each matrix M of ``x``, or of ``x + residual``.

    Kernels equal one another bit for bit. They differ from the definition, which sums in another
    order, by at most ``m * 2^-23`` times the sum of the magnitudes of the m products.

    Args:
        x: the bucket, contiguous: float32, float16, bfloat16, or float64 (without kernels).
        right: float32 (float64 for an ``x`` of float64), ``matrices.right_numel`` entries.
        left: same dtype, ``matrices.left_numel`` entries.
        residual: same dtype, as many entries as ``x``; requires ``total``.
        total: same dtype, as many entries as ``x``; receives ``x + residual`` where matrices lie.
            May be ``x`` or ``residual``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    # There is nothing to write then; kernels would copy the bucket onto itself.
    total = None if total is x and residual is None else total
    multiply_right_op(x, residual, total, _table("multiply_right", matrices), right, left)


def multiply_left(matrices: Matrices, x: Tensor, left: Tensor, right: Tensor) -> None:
    """Writes the right factors ``left @ M`` of each matrix; otherwise as :func:`multiply_right`."""
    multiply_left_op(x, _table("multiply_left", matrices), left, right)


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
) -> None:
    """Writes ``left^T @ right`` of each matrix to ``out``; entries of no matrix stay unchanged.

    In the same pass, ``unsent`` receives what the sent factors leave out of ``total``:
    ``total - sent[0]^T @ sent[1]``. Kernels sum in the order of the rows of the factors, so that
    all machines get the same bits.

    Args:
        left, right: float32 (float64 for an ``out`` of float64).
        out: float32, float16, bfloat16 or float64, contiguous.
        sent: the left and the right factors that this rank sent; required with ``unsent``.
        total, unsent: dtype of the factors, as many entries as ``out``; ``unsent`` requires
            ``total``. One of ``out`` and ``unsent`` may be ``total``.
        finite: one bool; where it is False, all entries of ``out`` in matrices become NaN.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    table = _table("decode_low_rank", matrices)
    if unsent is None:
        expand_op(left, right, None, None, None, table, None, out, finite)
        return
    if sent is None or total is None:
        raise ValueError("decode_low_rank(sent, total): needed for unsent")
    sent_left, sent_right = sent
    expand_op(left, right, sent_left, sent_right, total, table, unsent, out, finite)


def orthonormalize(matrices: Matrices, left: Tensor) -> None:
    """Makes the rows of each left factor orthonormal in place, by Gram-Schmidt.

    Sums are in float64 and each row is projected twice ("twice is enough", Giraud et al., 2005), so
    that rows are orthonormal to 2^-21 for any condition number. A row that depends on earlier ones
    becomes a unit row of its rounding errors, or zero; a row of zeros stays zero. NaN stays within
    its matrix. Kernels equal one another bit for bit.

    Args:
        left: float32 or float64, ``matrices.left_numel`` entries.
    """
    orthonormalize_op(left, _table("orthonormalize", matrices))


def unit_rows(matrices: Matrices, right: Tensor, fresh: Tensor) -> None:
    """Divides each row of the right factors by its norm, in place; ``fresh`` replaces dead rows.

    A row is dead if its norm is at most 2^-19 of the largest of its matrix: it holds nothing but
    rounding errors, and a row of zeros would stay zero in every later power iteration.

    Args:
        right, fresh: float32 or float64, ``matrices.right_numel`` entries.
    """
    unit_rows_op(right, fresh, _table("unit_rows", matrices))


def _table(caller: str, matrices: Matrices) -> Tensor:
    if not isinstance(matrices, Matrices):
        raise TypeError(f"{caller}(matrices): Matrices, got {type(matrices).__name__}")
    # Ops take the table: a schema of torch.library has no type for `Matrices`.
    return matrices.table


# CPU kernels -----------------------------------------------------------------------------------


@multiply_right_op.kernel("cpu")
def _multiply_right_cpu(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    right: Tensor,
    left: Tensor,
) -> None:
    # All matrices in one call: a model has dozens, and a call of an op costs 6 to 18 microseconds.
    source = (cpu.DTYPES[x.dtype], table, len(table) - 1, x)
    cpu.call("multiply_right", *source, residual, total, right, left)


@multiply_left_op.kernel("cpu")
def _multiply_left_cpu(x: Tensor, table: Tensor, left: Tensor, right: Tensor) -> None:
    source = (cpu.DTYPES[x.dtype], table, len(table) - 1, x)
    cpu.call("multiply_left", *source, left, right)


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
) -> None:
    source = (cpu.DTYPES[out.dtype], table, len(table) - 1, left, right)
    cpu.call("expand", *source, sent_left, sent_right, total, unsent, out, finite)


@orthonormalize_op.kernel("cpu")
def _orthonormalize_cpu(left: Tensor, table: Tensor) -> None:
    cpu.call("orthonormalize", table, len(table) - 1, left)


@unit_rows_op.kernel("cpu")
def _unit_rows_cpu(right: Tensor, fresh: Tensor, table: Tensor) -> None:
    cpu.call("unit_rows", table, len(table) - 1, fresh, right)


# CUDA kernels ----------------------------------------------------------------------------------


def _launch(like: Tensor, kernel: str, warps: int, *arguments: Tensor | float | None) -> None:
    cuda.launch("low_rank.cu", kernel, like.device, warps, arguments)


@multiply_right_op.kernel("cuda")
def _multiply_right_cuda(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    right: Tensor,
    left: Tensor,
) -> None:
    # Partial sums go through memory, and a second launch adds them in their order. Atomic additions
    # would save it, but their order, and so the bits, would change from run to run.
    there = on_device(table, x.device)
    sums = torch.empty(there.block_sums, dtype=torch.float32, device=x.device)
    source = (there.table, there.matrices, there.block_tasks, x, residual, total, right, sums)
    _launch(x, f"multiply_right<{cuda.DTYPES[x.dtype]}>", there.block_tasks, *source)
    added = (there.table, there.matrices, there.lefts, sums, left)
    _launch(x, "add_segments", there.lefts // 32 + 1, *added)


@multiply_left_op.kernel("cuda")
def _multiply_left_cuda(x: Tensor, table: Tensor, left: Tensor, right: Tensor) -> None:
    there = on_device(table, x.device)
    sums = torch.empty(there.chunk_sums, dtype=torch.float32, device=x.device)
    source = (there.table, there.matrices, there.chunk_tasks, x, left, sums)
    _launch(x, f"multiply_left<{cuda.DTYPES[x.dtype]}>", there.chunk_tasks, *source)
    added = (there.table, there.matrices, there.rights, sums, right)
    _launch(x, "add_chunks", there.rights // 32 + 1, *added)


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
) -> None:
    there = on_device(table, out.device)
    source = (there.table, there.matrices, there.block_tasks, left, right, sent_left, sent_right)
    kernel = f"expand<{cuda.DTYPES[out.dtype]}>"
    _launch(out, kernel, there.block_tasks, *source, total, unsent, out, finite)


@orthonormalize_op.kernel("cuda")
def _orthonormalize_cuda(left: Tensor, table: Tensor) -> None:
    # A block of 8 warps per matrix: each row depends on the rows before it.
    there = on_device(table, left.device)
    _launch(left, "orthonormalize", 8 * there.matrices, there.table, there.matrices, left)


@unit_rows_op.kernel("cuda")
def _unit_rows_cuda(right: Tensor, fresh: Tensor, table: Tensor) -> None:
    there = on_device(table, right.device)
    _launch(right, "unit_rows", 8 * there.matrices, there.table, there.matrices, fresh, right)
