"""Products of all matrices of a bucket with thin factors: the arithmetic of PowerSGD.

Factors are rank-major: the left factor of an n x m matrix has shape (r, n), the right one (r, m).
A thin operand with rank as its last, fastest dimension costs MKL 3 to 26 times more. All matrices
of a bucket are worked on in one call.
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

# What users call -------------------------------------------------------------------------------


def multiply_right(
    matrices: Matrices,
    x: Tensor,
    right: Tensor,
    left: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Writes the left factors ``right @ M^T``, for M in ``x`` or in ``x + residual``.

    Kernels equal one another bit for bit. They differ from the definition, whose sums have another
    order, by at most ``m * 2^-23`` times the sum of the magnitudes of the m products.

    Args:
        x: float32, float16, bfloat16 or float64 (PyTorch code only), contiguous; the bucket.
        right: the dtype that ``x`` is worked on in, ``matrices.right_numel`` entries.
        left: same dtype, ``matrices.left_numel`` entries.
        residual: same dtype, as many entries as ``x``; needs ``total``.
        total: same dtype, as many; gets ``x + residual`` where matrices lie. May be either of them.

    Raises:
        TypeError, ValueError: a tensor of another dtype, size or device; names the argument.
    """
    total = None if total is x and residual is None else total
    multiply_right_op(x, residual, total, _table("multiply_right", matrices), right, left)


def multiply_left(matrices: Matrices, x: Tensor, left: Tensor, right: Tensor) -> None:
    """Writes the right factors ``left @ M``; otherwise as :func:`multiply_right`."""
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
) -> None:
    """Writes ``left^T @ right`` of each matrix to the bucket ``out``; the rest stays as it is.

    In the same pass, ``unsent`` gets what is left of ``total`` without the factors that were sent:
    ``total - sent[0]^T @ sent[1]``. Kernels sum in the order of ranks, so that all machines get the
    same bits.

    Args:
        left, right: float32 (float64 for an ``out`` of float64).
        out: float32, float16, bfloat16 or float64, contiguous.
        sent: a left and a right factor; these and ``total`` are needed for ``unsent``.
        total, unsent: dtype of the factors, as many entries as ``out``. One of ``out`` and
            ``unsent`` may be ``total``.

    Raises:
        TypeError, ValueError: a tensor of another dtype, size or device; names the argument.
    """
    table = _table("decode_low_rank", matrices)
    if unsent is None:
        expand_op(left, right, None, None, None, table, None, out)
        return
    if sent is None or total is None:
        raise ValueError("decode_low_rank(sent, total): needed for unsent")
    sent_left, sent_right = sent
    expand_op(left, right, sent_left, sent_right, total, table, unsent, out)


def orthonormalize(matrices: Matrices, left: Tensor) -> None:
    """Makes the rows of each left factor orthonormal, in place: row k from the first k rows.

    Gram-Schmidt with sums in float64, each row projected twice ("twice is enough", Giraud et al.,
    2005): orthonormal to 2^-21 for any condition number. Rows that depend on earlier ones end as a
    unit row of their rounding errors, or as zero, as do rows of zeros. NaN stays with its matrix.
    Kernels equal one another bit for bit.

    Args:
        left: float32 or float64, ``matrices.left_numel`` entries.
    """
    orthonormalize_op(left, _table("orthonormalize", matrices))


def unit_rows(matrices: Matrices, right: Tensor, fresh: Tensor) -> None:
    """Divides rows of the right factors by their norms, in place; ``fresh`` replaces dead ones.

    A row below 2^-19 of its matrix's largest holds rounding errors at best. A power iteration does
    not mind the length of a row, but a zero row would stay zero for ever.

    Args:
        right, fresh: float32 or float64, ``matrices.right_numel`` entries.
    """
    unit_rows_op(right, fresh, _table("unit_rows", matrices))


def _table(caller: str, matrices: Matrices) -> Tensor:
    if not isinstance(matrices, Matrices):
        raise TypeError(f"{caller}(matrices): Matrices, got {type(matrices).__name__}")
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
) -> None:
    source = (cpu.DTYPES[out.dtype], table, len(table) - 1, left, right)
    cpu.call("expand", *source, sent_left, sent_right, total, unsent, out)


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
    found = on_device(table, x.device)
    sums = torch.empty(found.block_sums, device=x.device)
    source = (found.table, found.matrices, found.block_tasks, x, residual, total, right, sums)
    _launch(x, f"multiply_right<{cuda.DTYPES[x.dtype]}>", found.block_tasks, *source)
    _launch(
        x,
        "add_segments",
        found.lefts // 32 + 1,
        found.table,
        found.matrices,
        found.lefts,
        sums,
        left,
    )


@multiply_left_op.kernel("cuda")
def _multiply_left_cuda(x: Tensor, table: Tensor, left: Tensor, right: Tensor) -> None:
    found = on_device(table, x.device)
    sums = torch.empty(found.chunk_sums, device=x.device)
    source = (found.table, found.matrices, found.chunk_tasks, x, left, sums)
    _launch(x, f"multiply_left<{cuda.DTYPES[x.dtype]}>", found.chunk_tasks, *source)
    _launch(
        x,
        "add_chunks",
        found.rights // 32 + 1,
        found.table,
        found.matrices,
        found.rights,
        sums,
        right,
    )


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
) -> None:
    found = on_device(table, out.device)
    source = (found.table, found.matrices, found.block_tasks, left, right, sent_left, sent_right)
    kernel = f"expand<{cuda.DTYPES[out.dtype]}>"
    _launch(out, kernel, found.block_tasks, *source, total, unsent, out)


@orthonormalize_op.kernel("cuda")
def _orthonormalize_cuda(left: Tensor, table: Tensor) -> None:
    found = on_device(table, left.device)
    _launch(left, "orthonormalize", 8 * found.matrices, found.table, found.matrices, left)


@unit_rows_op.kernel("cuda")
def _unit_rows_cuda(right: Tensor, fresh: Tensor, table: Tensor) -> None:
    found = on_device(table, right.device)
    _launch(right, "unit_rows", 8 * found.matrices, found.table, found.matrices, fresh, right)
