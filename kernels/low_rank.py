"""Ops of low-rank schemes, over batches of equally shaped matrices.

Factors are rank-major: the left factor of a batch of n x m matrices has shape (b, r, n), the right
one (b, r, m). A thin operand with rank as its last, fastest dimension costs MKL 3 to 26 times more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "decode_low_rank",
    "multiply_left",
    "multiply_right",
    "orthonormalize",
    "subtract_low_rank",
    "unit_rows",
]

# torch multiplies into a strided batch one matrix at a time, about 2 us each. Below this many
# entries a matrix, a product in cache and a copy are faster (64 x 64: 0.5 to 0.85 of the time).
_SMALL = 1 << 13
_CHUNK = 1 << 17  # entries decoded at once: 512 kB of float32 stay in the cache


def orthonormalize(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of each matrix, in the same order.

    Column j lies in the span of the first j columns of the input, up to rounding. Columns that
    depend on earlier ones, zero columns among them, are replaced: the result is orthonormal
    whatever finite values come in. NaN gives NaN or anything else, without an error.

    On the CPU, LAPACK's Householder QR took 1 us per 64 x 4 matrix and 0.25 ms for 50000 x 4
    (2 cores, torch 2.13); Gram-Schmidt over the batch needed 1 to 9 times, Cholesky QR with a
    float64 Gram matrix 1.5 to 7 times as long, except for rank 1, which is a norm, here.

    Args:
        matrices: shape (b, n, r) with r <= n, float32 or float64.

    Returns:
        Shape (b, n, r); its transpose (b, r, n) is contiguous.
    """
    if matrices.shape[-1] == 1:
        return _unit_columns(matrices)
    q: Tensor = torch.linalg.qr(matrices)[0]
    return q.mT.contiguous().mT


def _unit_columns(columns: Tensor) -> Tensor:
    """Each (n, 1) matrix over its own norm; the first unit vector in place of a zero column."""
    # Divided by the largest entry first: squares of very large or small entries leave the range.
    largest = columns.abs().amax(dim=1, keepdim=True) if columns.shape[1] else columns
    zero = largest == 0
    unit = columns / torch.where(zero, 1.0, largest)
    unit[:, :1].add_(zero)
    norms: Tensor = torch.linalg.vector_norm(unit, dim=1, keepdim=True)
    return unit.div_(norms)


def unit_rows(factors: Tensor, fresh: Callable[[], Tensor]) -> Tensor:
    """Rows of norm 1; rows that vanish against their matrix's largest are replaced by ``fresh``.

    Such rows hold rounding errors at best. A power iteration does not mind the length of a row,
    but a zero row would stay zero for ever.

    Args:
        factors: shape (b, r, m).
        fresh: makes the replacement, same shape; on the CPU it is not called if all rows
            of all matrices are of similar size.
    """
    norms = torch.linalg.vector_norm(factors, dim=2, keepdim=True)
    unit: Tensor = factors / norms
    threshold = 16 * torch.finfo(factors.dtype).eps
    if norms.device.type == "cpu" and norms.numel():
        low, high = torch.aminmax(norms)
        if low.item() > threshold * high.item():  # the usual case: no row of any matrix is dead
            return unit
    dead = norms <= threshold * norms.amax(dim=1, keepdim=True)
    return torch.where(dead, fresh(), unit)


def multiply_right(matrices: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """The left factor ``right @ matrices^T``: (b, n, m) and (b, r, m) give (b, r, n)."""
    return torch.bmm(right, matrices.mT, out=out)


def multiply_left(matrices: Tensor, left: Tensor, out: Tensor) -> Tensor:
    """The right factor ``left @ matrices``: (b, n, m) and (b, r, n) give (b, r, m)."""
    return torch.bmm(left, matrices, out=out)


def decode_low_rank(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Writes ``left^T @ right``, shape (b, n, m), to ``out``, which may have a narrower dtype."""
    step = _chunk(out, same_dtype=out.dtype == left.dtype)
    if step == 0:
        return torch.bmm(left.mT, right, out=out)
    for begin in range(0, len(out), step):
        part = slice(begin, begin + step)
        out[part].copy_(torch.bmm(left[part].mT, right[part]))
    return out


def subtract_low_rank(matrices: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Subtracts ``left^T @ right`` from ``matrices``, in place."""
    step = _chunk(matrices, same_dtype=True)
    if step == 0:
        return matrices.baddbmm_(left.mT, right, alpha=-1)
    for begin in range(0, len(matrices), step):
        part = slice(begin, begin + step)
        matrices[part].sub_(torch.bmm(left[part].mT, right[part]))
    return matrices


def _chunk(matrices: Tensor, *, same_dtype: bool) -> int:
    """Matrices to multiply into scratch at once; 0 to multiply in place."""
    count, rows, columns = matrices.shape
    size = rows * columns
    if same_dtype and (
        matrices.device.type != "cpu" or size > _SMALL or count < 8 or matrices.is_contiguous()
    ):
        return 0
    return max(1, _CHUNK // max(size, 1))
