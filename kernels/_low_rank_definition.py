"""Declares the ops of ``low_rank``: their definitions and the checks of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from ._matrices import Matrices, matrices_of, runs_of
from ._tail import check_table, check_tail, gather, scatter, subtract
from .runtime.op import check, op

__all__ = ["expand_op", "multiply_left_op", "multiply_right_op", "subtract_op"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BUCKETS = (*_DTYPES, torch.float64)
_IN_PLACE = [("x", "total"), ("residual", "total")]

# All ops also carry the tail, which no matrix has: `tails` is its table.


@op(
    "multiply_right(Tensor x, Tensor? residual, Tensor(a!)? total, Tensor table, Tensor right,"
    " Tensor(b!) left, Tensor(c!)? own, Tensor? tails, Tensor(d!)? tail) -> ()",
    same=_IN_PLACE,
)
def multiply_right_op(
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
    for run in runs_of(table):
        source = run.bucket(x).to(left.dtype)  # 16-bit entries are summed in float32
        if residual is not None:
            source = source + run.bucket(residual)
        # Only after the sum is formed, since `total` may be `x` or `residual`.
        if total is not None:
            run.bucket(total).copy_(source)
        run.left(left).copy_(torch.bmm(run.right(right), source.mT))
    if own is not None:
        own.copy_(left)
    if tails is not None and tail is not None:
        gather(x, residual, total, tails, tail)


@op(
    "multiply_left(Tensor x, Tensor? residual, Tensor(a!)? total, Tensor table, Tensor left,"
    " Tensor(b!) right, Tensor(c!)? own, Tensor? tails, Tensor(d!)? tail) -> ()",
    same=_IN_PLACE,
)
def multiply_left_op(
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
    for run in runs_of(table):
        source = run.bucket(x).to(right.dtype)
        if residual is not None:
            source = source + run.bucket(residual)
        if total is not None:
            run.bucket(total).copy_(source)
        run.right(right).copy_(torch.bmm(run.left(left), source))
    if own is not None:
        own.copy_(right)
    if tails is not None and tail is not None:
        gather(x, residual, total, tails, tail)


@op(
    "expand(Tensor left, Tensor right, Tensor table, Tensor(a!) out, Tensor? finite,"
    " Tensor? tails, Tensor? tail) -> ()",
    caller="decode_low_rank",
)
def expand_op(
    left: Tensor,
    right: Tensor,
    table: Tensor,
    out: Tensor,
    finite: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    for run in runs_of(table):
        product = torch.bmm(run.left(left).mT, run.right(right))
        if finite is not None:
            product = torch.where(finite, product, float("nan"))
        run.bucket(out).copy_(product)
    if tails is not None and tail is not None:
        scatter(tail, tails, out)


@op(
    "subtract_low_rank(Tensor total, Tensor table, Tensor left, Tensor right, Tensor(a!) unsent,"
    " Tensor? tails, Tensor? sent) -> ()",
    same=[("total", "unsent")],
)
def subtract_op(
    total: Tensor,
    table: Tensor,
    left: Tensor,
    right: Tensor,
    unsent: Tensor,
    tails: Tensor | None,
    sent: Tensor | None,
) -> None:
    for run in runs_of(table):
        product = torch.bmm(run.left(left).mT, run.right(right))
        torch.sub(run.bucket(total), product, out=run.bucket(unsent))
    if tails is not None:
        subtract(total, tails, sent, unsent)


# Checks of arguments --------------------------------------------------------------------------


@multiply_right_op.check
def _check_right(
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
    matrices, work = _check_sum("multiply_right", table, x, residual, total)
    _check_factors("multiply_right", matrices, left, right, x, work)
    if own is not None:
        check("multiply_right", "own", own, like=x, dtypes=(work,), n=matrices.left_numel)
    check_tail("multiply_right", tails, x, tail)


@multiply_left_op.check
def _check_left(
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
    matrices, work = _check_sum("multiply_left", table, x, residual, total)
    _check_factors("multiply_left", matrices, left, right, x, work)
    if own is not None:
        check("multiply_left", "own", own, like=x, dtypes=(work,), n=matrices.right_numel)
    check_tail("multiply_left", tails, x, tail)


@expand_op.check
def _check_expand(
    left: Tensor,
    right: Tensor,
    table: Tensor,
    out: Tensor,
    finite: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    matrices, work = _check_bucket("decode_low_rank", table, "out", out)
    _check_factors("decode_low_rank", matrices, left, right, out, work)
    if finite is not None:
        check("decode_low_rank", "finite", finite, like=out, dtypes=(torch.bool,), n=1)
    check_tail("decode_low_rank", tails, out, tail)


@subtract_op.check
def _check_subtract(
    total: Tensor,
    table: Tensor,
    left: Tensor,
    right: Tensor,
    unsent: Tensor,
    tails: Tensor | None,
    sent: Tensor | None,
) -> None:
    caller = "subtract_low_rank"
    check(caller, "total", total, like=total, dtypes=(torch.float32, torch.float64))
    matrices, work = _check_bucket(caller, table, "total", total)
    _check_factors(caller, matrices, left, right, total, work)
    check(caller, "unsent", unsent, like=total, dtypes=(work,), n=total.numel())
    if tails is not None:
        check_table(caller, tails, total, sent)
    elif sent is not None:
        raise ValueError(f"{caller}(tail): a table is needed")


def _check_sum(
    caller: str, table: Tensor, x: Tensor, residual: Tensor | None, total: Tensor | None
) -> tuple[Matrices, torch.dtype]:
    matrices, work = _check_bucket(caller, table, "x", x)
    if residual is not None and total is None:
        raise ValueError(f"{caller}(total): needed with a residual")
    for name, tensor in (("residual", residual), ("total", total)):
        if tensor is not None:
            check(caller, name, tensor, like=x, dtypes=(work,), n=x.numel())
    return matrices, work


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
@subtract_op.beyond_kernels
def _is_double(first: Tensor, *rest: Tensor | None) -> bool:
    """Returns whether the first argument is float64, for which there are no kernels."""
    # Its dtype decides: the checks have compared the other tensors with it.
    return first.dtype == torch.float64
