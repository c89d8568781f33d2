"""Makes the rows of low-rank factors orthonormal, or of norm 1."""

from __future__ import annotations

import torch
from torch import Tensor

from ._matrices import Matrices, matrices_of, on_device, runs_of, table_of
from .runtime import cpu, cuda
from .runtime.op import Entries, like, op

__all__ = ["orthonormalize", "orthonormalize_op", "unit_rows", "unit_rows_op"]

_WORK = (torch.float32, torch.float64)
# Shares of squared norms, and the numbers of partial sums and of rows in a group: as in low_rank.h.
_DEAD, _VANISHED = 2.0**-38, 2.0**-64
_SUMS, _GROUP = 1024, 4


def orthonormalize(matrices: Matrices, left: Tensor, out: Tensor | None = None) -> None:
    """Makes the rows of each left factor orthonormal by Gram-Schmidt, in place or in ``out``.

    Sums are in float64 and each row is projected twice ("twice is enough", Giraud et al., 2005), so
    that rows are orthonormal to 2^-21 for any condition number. A row that depends on earlier ones
    becomes a unit row of its rounding errors, or zero; a row of zeros stays zero. NaN stays within
    its matrix. Kernels equal the definition bit for bit.

    Args:
        left: float32 or float64, ``matrices.left_numel`` entries.
        out: like ``left``.
    """
    orthonormalize_op(left, left if out is None else out, table_of("orthonormalize", matrices))


def unit_rows(matrices: Matrices, right: Tensor, fresh: Tensor, out: Tensor | None = None) -> None:
    """Divides each row of the right factors by its norm, in place or in ``out``.

    Rows of ``fresh`` replace dead ones. A row is dead if its norm is at most 2^-19 of the largest
    of its matrix: it holds nothing but rounding errors, and a row of zeros would stay zero in every
    later power iteration.

    Args:
        right, fresh: float32 or float64, ``matrices.right_numel`` entries.
        out: like ``right``.
    """
    unit_rows_op(right, fresh, right if out is None else out, table_of("unit_rows", matrices))


@op(
    "orthonormalize(Tensor left, Tensor(a!) out, Tensor table) -> ()",
    same=[("left", "out")],
    takes={
        "table": matrices_of,
        "left": Entries(_WORK, n="table.left_numel"),
        "out": Entries(like("left"), n="left"),
    },
)
def orthonormalize_op(left: Tensor, out: Tensor, table: Tensor) -> None:
    for run in runs_of(table):
        rows = run.left(left).double()
        done: list[Tensor] = []
        for k in range(run.rank):
            v = rows[:, k]
            before = _dot(v, v)
            # A row that almost depends on earlier ones is mostly rounding errors after the first
            # projection, which are not orthogonal to these; the second one makes them so. Each
            # result is rounded to the factor's dtype, as in the kernels, which keep the row in
            # memory.
            for _ in range(2):
                for first in range(0, k, _GROUP):
                    group = done[first : first + _GROUP]
                    shares = [_dot(q, v) for q in group]
                    for share, q in zip(shares, group, strict=True):
                        v = v - share * q
                    v = v.to(left.dtype).double()
            norm = _dot(v, v)
            # Less than 2^-32 of the length remains where the row cancels exactly. It becomes zero,
            # where a division would give infinity. The comparison is false for NaN, which stays.
            unit = v * torch.where(norm <= before * _VANISHED, 0.0, 1.0 / norm.sqrt())
            done.append(unit.to(left.dtype).double())
        for k, row in enumerate(done):
            run.left(out)[:, k] = row


@op(
    "unit_rows(Tensor right, Tensor fresh, Tensor(a!) out, Tensor table) -> ()",
    same=[("right", "out")],
    takes={
        "table": matrices_of,
        "right": Entries(_WORK, n="table.right_numel"),
        "fresh": Entries(like("right"), n="right"),
        "out": Entries(like("right"), n="right"),
    },
)
def unit_rows_op(right: Tensor, fresh: Tensor, out: Tensor, table: Tensor) -> None:
    for run in runs_of(table):
        rows = run.right(right).double()
        norms = _dot(rows, rows)
        # A row that is not a number is no measure for the others.
        largest = torch.where(norms.isnan(), 0.0, norms).amax(dim=1, keepdim=True)
        # "<=", so that in a matrix of zeros all rows are dead.
        dead = norms <= largest * _DEAD
        run.right(out).copy_(torch.where(dead, run.right(fresh), rows * (1.0 / norms.sqrt())))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sums of products over the last dimension, in the order of the kernels."""
    products = a * b
    whole = -(-products.shape[-1] // _SUMS) * _SUMS
    padded = torch.nn.functional.pad(products, (0, whole - products.shape[-1]))
    sums: Tensor = torch.zeros_like(padded[..., :_SUMS])
    for part in padded.split(_SUMS, dim=-1):
        sums = sums + part
    sums = sums.unflatten(-1, (32, 32))
    for _ in range(2):  # of each 32 sums, and of the 32 results
        while sums.shape[-1] > 1:
            half = sums.shape[-1] // 2
            sums = sums[..., :half] + sums[..., half:]
        sums = sums.squeeze(-1)
    return sums.unsqueeze(-1)


@orthonormalize_op.beyond_kernels
@unit_rows_op.beyond_kernels
def _is_double(first: Tensor, *rest: Tensor) -> bool:
    return first.dtype == torch.float64  # as the others, which the checks have compared with it


# Kernels --------------------------------------------------------------------------------------


@orthonormalize_op.kernel("cpu")
def _orthonormalize_cpu(left: Tensor, out: Tensor, table: Tensor) -> None:
    cpu.call("orthonormalize", table, table.shape[0] - 1, left, out)


@unit_rows_op.kernel("cpu")
def _unit_rows_cpu(right: Tensor, fresh: Tensor, out: Tensor, table: Tensor) -> None:
    cpu.call("unit_rows", table, table.shape[0] - 1, right, fresh, out)


@orthonormalize_op.kernel("cuda")
def _orthonormalize_cuda(*arguments: Tensor) -> None:
    _launch("orthonormalize", *arguments)


@unit_rows_op.kernel("cuda")
def _unit_rows_cuda(*arguments: Tensor) -> None:
    _launch("unit_rows", *arguments)


def _launch(kernel: str, *arguments: Tensor) -> None:
    # A block per matrix: each row depends on the rows before it.
    *factors, table = arguments
    device = factors[0].device
    device_matrices = on_device(table, device)
    warps = _SUMS // 32 * device_matrices.matrices
    places = (device_matrices.table, device_matrices.matrices)
    cuda.launch("orthonormal.cu", kernel, device, warps, (*places, *factors), threads=_SUMS)
