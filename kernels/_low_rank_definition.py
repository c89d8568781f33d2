"""Declares the ops of ``low_rank``: their definitions and the checks of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from ._matrices import Matrices, matrices_of, runs_of
from .runtime.op import check, op

__all__ = [
    "expand_op",
    "multiply_left_op",
    "multiply_right_op",
    "orthonormalize_op",
    "unit_rows_op",
]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WORK = (torch.float32, torch.float64)
_BUCKETS = (*_DTYPES, torch.float64)
# Shares of a norm and of a squared norm; kDead of low_rank.h is a share of the squared norm.
_DEAD, _VANISHED = 2.0**-19, 2.0**-64


@op(
    "multiply_right(Tensor x, Tensor? residual, Tensor(a!)? total, Tensor table, Tensor right,"
    " Tensor(b!) left) -> ()",
    same=[("x", "total"), ("residual", "total")],
)
def multiply_right_op(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    right: Tensor,
    left: Tensor,
) -> None:
    for run in runs_of(table):
        source = run.bucket(x).to(left.dtype)  # 16-bit entries are summed in float32
        if residual is not None:
            source = source + run.bucket(residual)
        # Only after the sum is formed, since `total` may be `x` or `residual`.
        if total is not None:
            run.bucket(total).copy_(source)
        run.left(left).copy_(torch.bmm(run.right(right), source.mT))


@op("multiply_left(Tensor x, Tensor table, Tensor left, Tensor(a!) right) -> ()")
def multiply_left_op(x: Tensor, table: Tensor, left: Tensor, right: Tensor) -> None:
    for run in runs_of(table):
        source = run.bucket(x).to(right.dtype)
        run.right(right).copy_(torch.bmm(run.left(left), source))


@op(
    "expand(Tensor left, Tensor right, Tensor? sent_left, Tensor? sent_right, Tensor? total,"
    " Tensor table, Tensor(a!)? unsent, Tensor(b!) out, Tensor? finite) -> ()",
    caller="decode_low_rank",
    same=[("total", "unsent"), ("total", "out")],
)
def expand_op(
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
    for run in runs_of(table):
        # Before `out`, which may be `total`.
        if not (sent_left is None or sent_right is None or total is None or unsent is None):
            sent = torch.bmm(run.left(sent_left).mT, run.right(sent_right))
            torch.sub(run.bucket(total), sent, out=run.bucket(unsent))
        product = torch.bmm(run.left(left).mT, run.right(right))
        if finite is not None:
            product = torch.where(finite, product, float("nan"))
        run.bucket(out).copy_(product)


@op("orthonormalize(Tensor(a!) left, Tensor table) -> ()")
def orthonormalize_op(left: Tensor, table: Tensor) -> None:
    for run in runs_of(table):
        rows = run.left(left)
        done: list[Tensor] = []
        for k in range(run.rank):
            # Sums in float64 and two projections give orthonormal rows whatever the condition
            # number (docs/design/kernels.md).
            v = rows[:, k].double()
            before = v.square().sum(1, keepdim=True)
            # A row that almost depends on earlier ones is mostly rounding errors after the first
            # projection, which are not orthogonal to these; the second one makes them so. Each
            # result is rounded to the factor's dtype, as in the kernels, which keep the row in
            # memory.
            for _ in range(2):
                for q in done:
                    v = (v - (q * v).sum(1, keepdim=True) * q).to(left.dtype).double()
            norm = v.square().sum(1, keepdim=True)
            # Less than 2^-32 of the length remains where the row cancels exactly. It becomes zero,
            # where a division would give infinity. The comparison is false for NaN, which stays.
            unit = v * torch.where(norm <= before * _VANISHED, 0.0, norm.rsqrt())
            done.append(unit.to(left.dtype).double())
            rows[:, k] = unit


@op("unit_rows(Tensor(a!) right, Tensor fresh, Tensor table) -> ()")
def unit_rows_op(right: Tensor, fresh: Tensor, table: Tensor) -> None:
    for run in runs_of(table):
        rows, new = run.right(right), run.right(fresh)
        norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True, dtype=torch.float64)
        # "<=", so that in a matrix of zeros all rows are dead.
        dead = norms <= norms.amax(dim=1, keepdim=True) * _DEAD
        rows.copy_(torch.where(dead, new, (rows / norms).to(rows.dtype)))


# Checks of arguments --------------------------------------------------------------------------


@multiply_right_op.check
def _check_right(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    right: Tensor,
    left: Tensor,
) -> None:
    matrices, work = _check_bucket("multiply_right", table, "x", x)
    _check_factors("multiply_right", matrices, left, right, x, work)
    if residual is not None and total is None:
        raise ValueError("multiply_right(total): needed with a residual")
    for name, tensor in (("residual", residual), ("total", total)):
        if tensor is not None:
            check("multiply_right", name, tensor, like=x, dtypes=(work,), n=x.numel())


@multiply_left_op.check
def _check_left(x: Tensor, table: Tensor, left: Tensor, right: Tensor) -> None:
    matrices, work = _check_bucket("multiply_left", table, "x", x)
    _check_factors("multiply_left", matrices, left, right, x, work)


@expand_op.check
def _check_expand(
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
    matrices, work = _check_bucket("decode_low_rank", table, "out", out)
    _check_factors("decode_low_rank", matrices, left, right, out, work)
    if finite is not None:
        check("decode_low_rank", "finite", finite, like=out, dtypes=(torch.bool,), n=1)
    if unsent is None:
        return
    if sent_left is None or sent_right is None or total is None:
        raise ValueError("decode_low_rank(sent, total): needed for unsent")
    _check_factors("decode_low_rank", matrices, sent_left, sent_right, out, work)
    for name, tensor in (("total", total), ("unsent", unsent)):
        check("decode_low_rank", name, tensor, like=out, dtypes=(work,), n=out.numel())


@orthonormalize_op.check
def _check_orthonormalize(left: Tensor, table: Tensor) -> None:
    n = matrices_of("orthonormalize", table).left_numel
    check("orthonormalize", "left", left, like=left, dtypes=_WORK, n=n)


@unit_rows_op.check
def _check_unit_rows(right: Tensor, fresh: Tensor, table: Tensor) -> None:
    n = matrices_of("unit_rows", table).right_numel
    check("unit_rows", "right", right, like=right, dtypes=_WORK, n=n)
    check("unit_rows", "fresh", fresh, like=right, dtypes=(right.dtype,), n=n)


def _check_bucket(
    caller: str, table: Tensor, name: str, flat: Tensor
) -> tuple[Matrices, torch.dtype]:
    """Returns the matrices, and the dtype in which the bucket is worked on."""
    matrices = matrices_of(caller, table)
    check(caller, name, flat, like=flat, dtypes=_BUCKETS)
    if flat.numel() < matrices.end:
        raise ValueError(f"{caller}({name}): {matrices.end} entries or more, got {flat.numel()}")
    return matrices, torch.float64 if flat.dtype == torch.float64 else torch.float32


def _check_factors(
    caller: str, matrices: Matrices, left: Tensor, right: Tensor, like: Tensor, work: torch.dtype
) -> None:
    check(caller, "left", left, like=like, dtypes=(work,), n=matrices.left_numel)
    check(caller, "right", right, like=like, dtypes=(work,), n=matrices.right_numel)


@multiply_right_op.beyond_kernels
@multiply_left_op.beyond_kernels
@expand_op.beyond_kernels
@orthonormalize_op.beyond_kernels
@unit_rows_op.beyond_kernels
def _is_double(first: Tensor, *rest: Tensor | None) -> bool:
    """Returns whether the first argument is float64, for which there are no kernels."""
    # Its dtype decides: the checks have compared the other tensors with it.
    return first.dtype == torch.float64
