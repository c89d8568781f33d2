"""Multiplies all matrices of a bucket with thin factors: the arithmetic of PowerSGD.

Factors have the rank as their first dimension: the left factor of an n x m matrix has shape (r, n),
the right one (r, m). With the rank as the last, contiguous dimension MKL takes 3 to 26 times as
long. One call handles all matrices of a bucket, and its tail: the entries that are in no matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _tail
from ._matrices import Matrices, OnDevice, Run, matrices_of, on_device, runs_of, table_of
from ._tail import gather, scatter, subtract, tail_of, tail_table
from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, Rule, op, wide

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


_BUCKETS = (*FLOATS, torch.float64)
_IN_PLACE = [("x", "total"), ("residual", "total")]

# All ops also take the tail, whose entries are in no matrix: `tails` is its table, `tail` the
# values.


def _takes(bucket: str, dtypes: tuple[torch.dtype, ...], **rules: Entries) -> dict[str, Rule]:
    """Returns the checks of an op's tensors: of its bucket, of the factors, and of others."""
    return {
        "table": matrices_of,
        "tails": tail_of,
        bucket: Entries(dtypes),
        "left": Entries(wide(bucket), n="table.left_numel"),
        "right": Entries(wide(bucket), n="table.right_numel"),
        **rules,
    }


def _takes_sum(factor: str) -> dict[str, Rule]:
    """Returns the checks of an op that adds a residual and writes ``factor``, and a copy of it."""
    return _takes(
        "x",
        _BUCKETS,
        residual=Entries(wide("x"), n="x"),
        total=Entries(wide("x"), n="x"),
        local_copy=Entries(wide("x"), n=factor),
        tail=Entries(wide("x"), n="tails.length"),
    )


@op(
    "multiply_right(Tensor x, Tensor? residual, Tensor(a!)? total, Tensor table, Tensor right,"
    " Tensor(b!) left, Tensor(c!)? local_copy, Tensor? tails, Tensor(d!)? tail) -> ()",
    same=_IN_PLACE,
    takes=_takes_sum("left"),
)
def multiply_right_op(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    right: Tensor,
    left: Tensor,
    local_copy: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    for run, source in _sum_with_residual(table, x, residual, total, left.dtype):
        run.left(left).copy_(torch.bmm(run.right(right), source.mT))
    if local_copy is not None:
        local_copy.copy_(left)
    if tails is not None and tail is not None:
        gather(x, residual, total, tails, tail)


@op(
    "multiply_left(Tensor x, Tensor? residual, Tensor(a!)? total, Tensor table, Tensor left,"
    " Tensor(b!) right, Tensor(c!)? local_copy, Tensor? tails, Tensor(d!)? tail) -> ()",
    same=_IN_PLACE,
    takes=_takes_sum("right"),
)
def multiply_left_op(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    left: Tensor,
    right: Tensor,
    local_copy: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    for run, source in _sum_with_residual(table, x, residual, total, right.dtype):
        run.right(right).copy_(torch.bmm(run.left(left), source))
    if local_copy is not None:
        local_copy.copy_(right)
    if tails is not None and tail is not None:
        gather(x, residual, total, tails, tail)


def _sum_with_residual(
    table: Tensor, x: Tensor, residual: Tensor | None, total: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[Run, Tensor]]:
    """Yields the matrices of ``x + residual``; also writes them to ``total``, if given."""
    for run in runs_of(table):
        source = run.read(x).to(dtype)  # 16-bit entries are summed in float32
        if residual is not None:
            source = source + run.read(residual)
        # Only after the sum is formed, since `total` may be `x` or `residual`.
        if total is not None:
            run.write(total, source)
        yield run, source


@op(
    "expand(Tensor left, Tensor right, Tensor table, Tensor(a!) out, Tensor? finite,"
    " Tensor? tails, Tensor? tail) -> ()",
    caller="decode_low_rank",
    takes=_takes(
        "out",
        _BUCKETS,
        finite=Entries(torch.bool, n=1),
        tail=Entries(wide("out"), n="tails.length"),
    ),
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
        run.write(out, product)
    if tails is not None and tail is not None:
        scatter(tail, tails, out)


@op(
    "subtract_low_rank(Tensor total, Tensor table, Tensor left, Tensor right, Tensor(a!) unsent,"
    " Tensor? tails, Tensor? sent) -> ()",
    same=[("total", "unsent")],
    takes=_takes(
        "total",
        (torch.float32, torch.float64),
        unsent=Entries(wide("total"), n="total"),
        sent=Entries(wide("total"), n="tails.length"),
    ),
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
        run.write(unsent, run.read(total) - product)
    if tails is not None:
        subtract(total, tails, sent, unsent)


# Checks of arguments --------------------------------------------------------------------------


@multiply_right_op.check
@multiply_left_op.check
def _check_sum(
    caller: str,
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    if residual is not None and total is None:
        raise ValueError(f"{caller}(total): needed with a residual")
    _check_pair(caller, tails, tail)
    _check_end(caller, "x", x, table, tails)


@expand_op.check
def _check_expand(
    caller: str, table: Tensor, out: Tensor, tails: Tensor | None, tail: Tensor | None
) -> None:
    _check_pair(caller, tails, tail)
    _check_end(caller, "out", out, table, tails)


@subtract_op.check
def _check_subtract(
    caller: str, total: Tensor, table: Tensor, tails: Tensor | None, sent: Tensor | None
) -> None:
    if sent is not None and tails is None:
        raise ValueError(f"{caller}(tail): a table is needed")
    _check_end(caller, "total", total, table, tails)


def _check_pair(caller: str, tails: Tensor | None, tail: Tensor | None) -> None:
    if (tails is None) != (tail is None):
        raise ValueError(f"{caller}(tail): a table and a tensor, or neither")


def _check_end(caller: str, name: str, bucket: Tensor, table: Tensor, tails: Tensor | None) -> None:
    """Raises unless all matrices and all of the tail lie in the bucket."""
    end, numel = matrices_of(table, caller).end, bucket.numel()
    if numel < end:
        raise ValueError(f"{caller}({name}): {end} entries or more, got {numel}")
    if tails is not None and numel < tail_of(tails, caller).end:
        end = tail_of(tails, caller).end
        raise ValueError(f"{caller}: a bucket of {end} entries or more, got {numel}")


@multiply_right_op.beyond_kernels
@multiply_left_op.beyond_kernels
@expand_op.beyond_kernels
@subtract_op.beyond_kernels
def _is_double(first: Tensor, *rest: Tensor | None) -> bool:
    """Returns whether the first argument is float64, for which there are no kernels."""
    # Its dtype decides: the checks have compared the other tensors with it.
    return first.dtype == torch.float64


# Public functions -------------------------------------------------------------------------------


def multiply_right(
    matrices: Matrices,
    x: Tensor,
    right: Tensor,
    left: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    local_copy: Tensor | None = None,
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
        local_copy: like ``left``, receives the same.
        tail: a table of :func:`tail_table`, and a tensor of the dtype of ``left``, as long as all
            its pieces together, which receives those of ``x + residual`` one after the other.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    # Then there is nothing to write; kernels would copy the bucket onto itself.
    total = None if total is x and residual is None else total
    table = table_of("multiply_right", matrices)
    multiply_right_op(x, residual, total, table, right, left, local_copy, *(tail or (None, None)))


def multiply_left(
    matrices: Matrices,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    local_copy: Tensor | None = None,
    tail: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes the right factors ``left @ M`` of each matrix M, as :func:`multiply_right`."""
    total = None if total is x and residual is None else total
    table = table_of("multiply_left", matrices)
    multiply_left_op(x, residual, total, table, left, right, local_copy, *(tail or (None, None)))


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

    Other entries of ``out`` stay unchanged. Kernels sum in the order of the rows of the factors, so
    that all machines get the same bits.

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
def _multiply_right_cpu(*arguments: Any) -> None:
    _multiply_cpu("multiply_right", *arguments)


@multiply_left_op.kernel("cpu")
def _multiply_left_cpu(*arguments: Any) -> None:
    _multiply_cpu("multiply_left", *arguments)


def _multiply_cpu(
    kernel: str,
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    factor: Tensor,
    result: Tensor,
    local_copy: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    # All matrices in one call: a model has dozens, and a call of an op costs 6 to 18 microseconds.
    dtype, source = cpu.DTYPES[x.dtype], (x, residual, total)
    cpu.call(kernel, dtype, table, table.shape[0] - 1, *source, factor, result)
    if local_copy is not None:
        local_copy.copy_(result)
    if tails is not None:
        cpu.call("gather_tail", dtype, tails, tails.shape[0] - 1, *source, tail)


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
    cpu.call("expand", dtype, table, table.shape[0] - 1, left, right, out, finite)
    if tails is not None:
        cpu.call("scatter_tail", dtype, tails, tails.shape[0] - 1, tail, out)


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
    cpu.call("subtract_low_rank", table, table.shape[0] - 1, total, left, right, unsent)
    if tails is not None:
        cpu.call("subtract_tail", tails, tails.shape[0] - 1, total, sent, unsent)


# CUDA kernels ----------------------------------------------------------------------------------

# Threads per block in the kernels of products. These use many registers, so a multiprocessor has
# room for 16 to 24 warps, and a bucket of 25 MiB has 12 for each: small blocks spread them evenly.
_THREADS = 128


def _launch(like: Tensor, kernel: str, warps: int, *arguments: Tensor | int | None) -> None:
    name = f"{kernel}<{cuda.DTYPES[like.dtype]}>"
    cuda.launch("low_rank.cu", name, like.device, warps, arguments, threads=_THREADS)


@multiply_right_op.kernel("cuda")
def _multiply_right_cuda(*arguments: Any) -> None:
    _multiply_cuda("multiply_right", *arguments)


@multiply_left_op.kernel("cuda")
def _multiply_left_cuda(*arguments: Any) -> None:
    _multiply_cuda("multiply_left", *arguments)


def _multiply_cuda(
    kernel: str,
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    table: Tensor,
    factor: Tensor,
    result: Tensor,
    local_copy: Tensor | None,
    tails: Tensor | None,
    tail: Tensor | None,
) -> None:
    device_table, pieces = on_device(table, x.device), _tail.on_device(tails, x.device)
    if kernel == "multiply_right":
        add_kernel, tasks, numel, sums = (
            "add_segments",
            device_table.block_tasks,
            device_table.lefts,
            device_table.block_sums,
        )
    else:
        add_kernel, tasks, numel, sums = (
            "add_chunks",
            device_table.chunk_tasks,
            device_table.rights,
            device_table.chunk_sums,
        )
    # Partial sums go through memory, and a second launch adds them in a fixed order. Atomic
    # additions would save that launch, but their order, and so the bits, would vary between runs.
    partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    places, source = (device_table.table, device_table.matrices), (x, residual, total)
    _launch(x, kernel, tasks, *places, tasks, *source, factor, partial)
    warps = (numel + pieces[2]) // 32 + 1
    _launch(
        x, add_kernel, warps, *places, numel, partial, result, local_copy, *pieces, *source, tail
    )


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
    device_table, pieces = on_device(table, out.device), _tail.on_device(tails, out.device)
    source = (device_table.table, device_table.matrices, device_table.block_tasks, left, right)
    _launch(out, "expand", _tasks(device_table, pieces[2]), *source, out, finite, *pieces, tail)


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
    device_table, pieces = on_device(table, total.device), _tail.on_device(tails, total.device)
    source = (
        device_table.table,
        device_table.matrices,
        device_table.block_tasks,
        total,
        left,
        right,
    )
    arguments = (*source, unsent, *pieces, sent)
    warps = _tasks(device_table, pieces[2])
    cuda.launch(
        "low_rank.cu", "subtract_low_rank", total.device, warps, arguments, threads=_THREADS
    )


def _tasks(device_table: OnDevice, tail_numel: int) -> int:
    """Returns the number of tasks, each for a warp: pieces of matrices, and of the tail."""
    return device_table.block_tasks + tail_numel // 256 + 1  # kTask entries of the tail each
