"""Computes the randomised Hadamard transform, which spreads every entry over its block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import philox
from ._tables import on_device
from .runtime import cpu, cuda
from .runtime.arguments import check_whole
from .runtime.op import Entries, op
from .segments import Segments, rows_of, segments_of

__all__ = ["check_signs", "hadamard", "transform"]

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)


def hadamard(
    x: Tensor,
    out: Tensor,
    block: int,
    random: philox.RandomBits,
    *,
    segments: Segments | None = None,
    row: int = -1,
    inverse: bool = False,
    accumulate: bool = False,
) -> None:
    """Writes ``H D x / sqrt(block)`` of each block, or with ``inverse`` the inverse of it.

    H is the Hadamard matrix, and D has random signs on its diagonal. The transform is orthonormal,
    and the entries of its result are close to a normal distribution for any x. Kernels equal the
    definition bit for bit: sums are taken in one order.

    Args:
        x: float32, contiguous: entries, or with ``inverse`` the slots of blocks.
        out: float32: the slots of blocks, or with ``inverse`` entries. Without ``segments`` it may
            be ``x``.
        block: entries per block, a power of two from 32 to 2048.
        random: bits for the signs; ``first`` is a multiple of 4096. Row r takes ``random.row(r)``.
        segments: where blocks begin, of ``segments_for(..., whole=True)``; slots that no entry
            has are zeros. A row of slots follows the other. None: the entries are a multiple of
            ``block``, and have the slots of the same number.
        row: ``x`` and ``out`` are this row; -1: all rows.
        inverse: applies the inverse transform.
        accumulate: adds the result of the inverse transform to ``out``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Ailon and Chazelle, The fast Johnson-Lindenstrauss transform, 2009.
    """
    if segments is not None and not isinstance(segments, Segments):
        raise TypeError(f"hadamard(segments): Segments or None, got {type(segments).__name__}")
    table = None if segments is None else segments.table
    hadamard_op(x, out, block, inverse, *philox.key_of("hadamard", random), table, row, accumulate)


@op(
    "hadamard(Tensor x, Tensor(a!) out, int block, bool inverse, Tensor step, int seed, int stream,"
    " int first, Tensor? table, int row, bool accumulate) -> ()",
    same=[("x", "out")],
    takes={"table": segments_of, "x": Entries(torch.float32), "out": Entries(torch.float32)},
)
def hadamard_op(
    x: Tensor,
    out: Tensor,
    block: int,
    inverse: bool,
    step: Tensor,
    seed: int,
    stream: int,
    first: int,
    table: Tensor | None,
    row: int,
    accumulate: bool,
) -> None:
    key = (step, seed, stream)
    if table is None:
        before = out.clone() if accumulate else None
        transform(x, out, block, inverse, *key, first)
        if before is not None:
            out += before
        return
    segments, flat, to = segments_of(table, "hadamard"), x.view(-1), out.view(-1)
    for place, (index, begin, end) in enumerate(rows_of(segments, row)):
        here = slice(place * segments.slots, (place + 1) * segments.slots)
        slots, entries = segments.coded(index, x.device)
        if inverse:
            blocks = flat[here].clone()
        else:
            blocks = x.new_zeros(segments.slots)
            blocks[slots] = flat[begin:end][entries]
        transform(blocks, blocks, block, inverse, *key, first + place * philox.ROW)
        if inverse:
            there = to[begin:end]
            there[entries] = there[entries] + blocks[slots] if accumulate else blocks[slots]
        else:
            used = segments.counts(index, block, x.device).bool().repeat_interleave(block)
            to[here] = torch.where(used, blocks, 0.0)  # signs would make some zeros negative


def transform(
    x: Tensor,
    out: Tensor,
    block: int,
    inverse: bool,
    step: Tensor,
    seed: int,
    stream: int,
    first: int,
) -> None:
    """Transforms blocks that follow each other; the signs are those from ``first`` on."""
    signs = philox.signs(x.numel(), int(step), seed, stream, first, device=x.device)
    rows = (x.flatten() if inverse else x.flatten() * signs).view(-1, block)
    # log2(block) steps of sums and differences instead of a product with H, in the kernels' order.
    distance = 1
    while distance < block:
        pairs = rows.view(len(rows), block // (2 * distance), 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack([low + high, low - high], 2).view(-1, block)
        distance *= 2
    # Rounded to float32 before the product, as the kernels' argument is.
    rows = rows * torch.tensor(block**-0.5, dtype=torch.float32, device=x.device)
    out.view(-1).copy_(rows.view(-1) * signs if inverse else rows.view(-1))


@hadamard_op.check
def _check(
    x: Tensor,
    out: Tensor,
    block: int,
    inverse: bool,
    step: Tensor,
    seed: int,
    stream: int,
    first: int,
    table: Tensor | None,
    row: int,
    accumulate: bool,
) -> None:
    if accumulate and not inverse:
        raise ValueError("hadamard(accumulate): the inverse transform is added, got inverse=False")
    if block not in BLOCKS:
        raise ValueError(f"hadamard(block): one of {', '.join(map(str, BLOCKS))}, got {block!r}")
    check_signs("hadamard", "random", x, step, seed, stream, first)
    n, slots = (x.numel(), x.numel()) if table is None else _sizes(table, block, row)
    if n % block and table is None:
        raise ValueError(f"hadamard(x): a multiple of {block} entries, got {n}")
    for name, tensor, numel in (
        ("x", x, slots if inverse else n),
        ("out", out, n if inverse else slots),
    ):
        if tensor.numel() != numel:
            raise ValueError(f"hadamard({name}): {numel} entries, got {tensor.numel()}")


def _sizes(table: Tensor, block: int, row: int) -> tuple[int, int]:
    """Returns the numbers of entries and of slots that the op works on."""
    segments = segments_of(table, "hadamard")
    rows = len(segments.rows)
    check_whole("hadamard", "row", row, -1, rows)
    check_whole("hadamard", "rows of segments", rows, 1, 2**16)  # a grid's second dimension
    if segments.most or segments.granule % block:
        raise ValueError(f"hadamard(segments): of segments_for(..., {block}, ..., whole=True)")
    begin, end = segments.row(row)
    return end - begin, segments.slots * (rows if row < 0 else 1)


def check_signs(caller: str, name: str, x: Tensor, step: Tensor, *key: int) -> None:
    """Raises unless the key is that of a stream of signs."""
    # 4096 entries share the calls of Philox here, where other draws share them among 256.
    philox.check_key(x, step, *key)
    if key[-1] % philox.SIGNS:
        raise ValueError(f"{caller}({name}): first is a multiple of {philox.SIGNS}, got {key[-1]}")


@hadamard_op.kernel("cpu")
def _hadamard_cpu(x: Tensor, out: Tensor, block: int, inverse: bool, *rest: Any) -> None:
    cpu.call("hadamard", block, x, x.numel(), block**-0.5, inverse, *rest, out)


@hadamard_op.kernel("cuda")
def _hadamard_cuda(x: Tensor, out: Tensor, block: int, inverse: bool, *rest: Any) -> None:
    *key, table, row, accumulate = rest
    n, device_table, rows = x.numel(), None, 1
    if table is not None:
        segments, device_table = segments_of(table, "hadamard"), on_device(table, x.device)
        n, rows = segments.slots, len(segments.rows) if row < 0 else 1
    arguments = (x, n, block**-0.5, inverse, *key, device_table, row, accumulate, out)
    warps = n // max(block, 256) + 1
    cuda.launch("hadamard.cu", f"hadamard<{block}>", x.device, warps, arguments, rows)
