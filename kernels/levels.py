"""Quantises to the nearest of given levels, with scales that are unbiased over rotations."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ._matrices import _version_of
from .runtime import cpu, cuda
from .runtime.arguments import as_tensor
from .runtime.op import check, op

__all__ = ["dequantize_levels", "quantize_levels"]

_BLOCKS = (128, 256, 512, 1024, 2048)
_COUNTS = (2, 4, 8, 16)
_ROW = 32  # lanes of a warp; partial sums of a block
_INFINITY = 0x7F800000  # bits of infinity
_TINY = (127 - 120) << 23  # bits of 2^-120; blocks below it decode to zero


def quantize_levels(
    x: Tensor, levels: Tensor, scales: Tensor, codes: Tensor, block: int, *, unsent: Tensor | None
) -> None:
    """Writes the number of the nearest level of each entry, and the scale of each block.

    Entries are measured in units of their block's root mean square. The scale is
    ``|x|^2 / <c, x>`` for a block x and its levels c, so that the projection of the decoded block
    on x is x: unbiased if x was rotated at random. A block that is not finite has a scale of NaN.
    Kernels equal the definition bit for bit: squares and products are added per place in rows of
    32, then halves to halves.

    Args:
        x: float32, contiguous, a multiple of ``block`` entries.
        levels: float32, ascending; 2, 4, 8 or 16 entries for codes of k = 1, 2, 3 or 4 bits. On the
            host, or where ``x`` is; from the host they are copied once.
        scales: float32, one entry per block.
        codes: uint8; 8 codes of k bits are k bytes, the first code in the lowest bits.
        block: 128, 256, 512, 1024 or 2048.
        unsent: float32, as many entries as ``x``; receives what is not sent. May be ``x``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Vargaftik et al., EDEN, 2022.
    """
    _check_levels("quantize_levels", levels)
    quantize_levels_op(x, _table(levels, x.device), scales, codes, unsent, block)


def dequantize_levels(
    scales: Tensor, codes: Tensor, levels: Tensor, out: Tensor, block: int, *, accumulate: bool
) -> None:
    """Writes the level of each entry, times the scale of its block, to ``out``.

    Args:
        scales, codes, levels, block: as for :func:`quantize_levels`.
        out: float32, contiguous, a multiple of ``block`` entries.
        accumulate: adds to ``out`` instead.
    """
    _check_levels("dequantize_levels", levels)
    dequantize_levels_op(scales, codes, _table(levels, out.device), out, block, accumulate)


def _check_levels(caller: str, levels: Tensor) -> None:
    as_tensor(caller, "levels", levels)
    check(caller, "levels", levels, like=levels, dtypes=(torch.float32,))
    if levels.dim() != 1 or levels.numel() not in _COUNTS:
        raise ValueError(f"{caller}(levels): 2, 4, 8 or 16, got {levels.numel()}")


def _table(levels: Tensor, device: torch.device | None = None) -> Tensor:
    """Returns the levels, followed by the bounds halfway between neighbours, on a device."""
    # Computed once, so that the definition and the kernels compare with the same bounds, and so
    # that a call launches nothing else. A cache is not what torch.compile traces.
    device = levels.device if device is None else device
    if torch.compiler.is_compiling():
        return _with_bounds(levels).to(device)
    return _known_table(levels, _version_of(levels), device)


@lru_cache(maxsize=64)  # by the tensor and the number of writes to it
def _known_table(levels: Tensor, version: int, device: torch.device) -> Tensor:
    # A copy from the host is over when it returns. What is computed on a device is not: another
    # stream that takes it out of the cache would not wait for it.
    return _with_bounds(levels).to(device)


def _with_bounds(levels: Tensor) -> Tensor:
    return torch.cat([levels, (levels[1:] + levels[:-1]) / 2])


@op(
    "quantize_levels(Tensor x, Tensor table, Tensor(a!) scales, Tensor(b!) codes,"
    " Tensor(c!)? unsent, int block) -> ()",
    same=[("x", "unsent")],
)
def quantize_levels_op(
    x: Tensor, table: Tensor, scales: Tensor, codes: Tensor, unsent: Tensor | None, block: int
) -> None:
    levels, bounds = _split(table)
    rows = x.view(-1, block)
    # As integers, magnitudes order as their values do, with infinity and NaN last: one maximum
    # tells whether a block is finite.
    largest = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1)
    good = (largest >= _TINY) & (largest < _INFINITY)
    unit = torch.where(good, largest.view(torch.float32), 1.0)
    # Divided by the largest magnitude first: squares of float32 entries may overflow or vanish.
    y = torch.where(good[:, None], rows * (1.0 / unit)[:, None], 0.0)
    square = summed(y * y)
    square = torch.where(good, square, 1.0)
    # full_like: a number over a tensor is a product with the reciprocal in torch, with other bits.
    z = y * (torch.full_like(square, math.sqrt(block)) / root_of(square))[:, None]
    # At most 15 comparisons with one bound each, as in the kernels; ties go to the lower level.
    nearest = torch.zeros_like(z, dtype=torch.uint8)
    for bound in bounds:
        nearest += z > bound
    chosen = levels[nearest.long()]
    product = summed(chosen * y)
    scale = torch.where(good, unit * (square / product), 0.0)
    scale = torch.where(largest >= _INFINITY, torch.nan, scale)
    scales.copy_(scale)
    codes.copy_(_packed(nearest.flatten(), _bits(levels)))
    if unsent is not None:
        unsent.view(-1, block).copy_(rows - chosen * scale[:, None])


@op(
    "dequantize_levels(Tensor scales, Tensor codes, Tensor table, Tensor(a!) out, int block,"
    " bool accumulate) -> ()"
)
def dequantize_levels_op(
    scales: Tensor, codes: Tensor, table: Tensor, out: Tensor, block: int, accumulate: bool
) -> None:
    levels, _ = _split(table)
    bits = _bits(levels)
    groups = codes.view(-1, bits).long()
    words = (groups << 8 * torch.arange(bits, device=codes.device)).sum(1)
    numbers = words[:, None] >> bits * torch.arange(8, device=codes.device) & (1 << bits) - 1
    entries = levels[numbers].view(-1, block) * scales[:, None]
    rows = out.view(-1, block)
    rows.copy_(rows + entries if accumulate else entries)


def _split(table: Tensor) -> tuple[Tensor, Tensor]:
    count = (table.numel() + 1) // 2
    return table[:count], table[count:]


def _bits(levels: Tensor) -> int:
    return levels.numel().bit_length() - 1


def summed(rows: Tensor, width: int = _ROW) -> Tensor:
    """Returns the sum of each row: per place in ``width`` entries, then halves are added."""
    parts = rows.view(len(rows), rows.shape[1] // width, width)
    total = torch.zeros_like(parts[:, 0])
    for row in parts.unbind(1):
        total = total + row
    half = width // 2
    while half:
        total = total[:, :half] + total[:, half : 2 * half]
        half //= 2
    return total[:, 0]


def root_of(square: Tensor) -> Tensor:
    """Returns the square root, rounded to the nearest float32."""
    # torch's root of float32 may be the next number: its library rounds so on some processors.
    return square.double().sqrt().float()


def _packed(numbers: Tensor, bits: int) -> Tensor:
    # Eight codes of 3 bits are 3 whole bytes; int64, since eight of 4 bits fill 32 bits and the
    # sign.
    words = (numbers.view(-1, 8).long() << bits * torch.arange(8, device=numbers.device)).sum(1)
    places = 8 * torch.arange(bits, device=numbers.device)
    return (words[:, None] >> places & 255).to(torch.uint8).flatten()


# Checks of arguments -------------------------------------------------------------------------


@quantize_levels_op.check
def _check_quantize(
    x: Tensor, table: Tensor, scales: Tensor, codes: Tensor, unsent: Tensor | None, block: int
) -> None:
    check("quantize_levels", "x", x, like=x, dtypes=(torch.float32,))
    _check("quantize_levels", x, table, block, scales, codes)
    if unsent is not None:
        check("quantize_levels", "unsent", unsent, like=x, dtypes=(torch.float32,), n=x.numel())


@dequantize_levels_op.check
def _check_dequantize(
    scales: Tensor, codes: Tensor, table: Tensor, out: Tensor, block: int, accumulate: bool
) -> None:
    check("dequantize_levels", "out", out, like=scales, dtypes=(torch.float32,))
    _check("dequantize_levels", out, table, block, scales, codes)


def _check(
    caller: str, x: Tensor, table: Tensor, block: int, scales: Tensor, codes: Tensor
) -> None:
    if block not in _BLOCKS or x.numel() % block:
        raise ValueError(
            f"{caller}(block): one of {_BLOCKS} that divides the number of entries, "
            f"got {block} and {x.numel()} entries"
        )
    check(caller, "levels", table, like=x, dtypes=(torch.float32,))
    count = (table.numel() + 1) // 2
    if table.numel() % 2 == 0 or count not in _COUNTS:
        raise ValueError(f"{caller}(levels): 3, 7, 15 or 31 with bounds, got {table.numel()}")
    check(caller, "scales", scales, like=x, dtypes=(torch.float32,), n=x.numel() // block)
    size = x.numel() * (count.bit_length() - 1) // 8
    check(caller, "codes", codes, like=x, dtypes=(torch.uint8,), n=size)


# Kernels --------------------------------------------------------------------------------------


@quantize_levels_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor, table: Tensor, scales: Tensor, codes: Tensor, unsent: Tensor | None, block: int
) -> None:
    arguments = (x, x.numel(), block, math.sqrt(block), table, scales, codes, unsent)
    cpu.call("quantize_levels", (table.numel() + 1) // 2, *arguments)


@quantize_levels_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor, table: Tensor, scales: Tensor, codes: Tensor, unsent: Tensor | None, block: int
) -> None:
    name, blocks = f"quantize_levels<{_bits(_split(table)[0])}>", scales.numel()
    arguments = (x, blocks, block, math.sqrt(block), table, scales, codes, unsent)
    cuda.launch("levels.cu", name, x.device, blocks, arguments)


@dequantize_levels_op.kernel("cpu")
def _dequantize_cpu(
    scales: Tensor, codes: Tensor, table: Tensor, out: Tensor, block: int, accumulate: bool
) -> None:
    arguments = (scales, codes, table, out.numel(), block, accumulate, out)
    cpu.call("dequantize_levels", (table.numel() + 1) // 2, *arguments)


@dequantize_levels_op.kernel("cuda")
def _dequantize_cuda(
    scales: Tensor, codes: Tensor, table: Tensor, out: Tensor, block: int, accumulate: bool
) -> None:
    name, blocks = f"dequantize_levels<{_bits(_split(table)[0])}>", scales.numel()
    arguments: tuple[Any, ...] = (scales, codes, table, blocks, block, accumulate, out)
    cuda.launch("levels.cu", name, out.device, blocks, arguments)
