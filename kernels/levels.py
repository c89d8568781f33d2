"""Quantises to the nearest of given levels, with scales that are unbiased over rotations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._tables import once_per_table
from .blockwise import aligned, as_messages
from .runtime import cpu, cuda
from .runtime.arguments import as_tensor
from .runtime.op import Entries, check, op

__all__ = ["dequantize_levels", "level_bytes", "quantize_levels", "root_of", "summed"]

_BLOCKS = (128, 256, 512, 1024, 2048)
_COUNTS = (2, 4, 8, 16)
_ROW = 32  # lanes of a warp; partial sums of a block
_INFINITY = 0x7F800000  # bits of infinity
_TINY = (127 - 120) << 23  # bits of 2^-120; blocks below it decode to zero


def even_rows(n: int, shard: int, rows: int) -> list[tuple[int, int, int]]:
    """Returns, by row of a message, its number and the begin and end of its entries."""
    return [(row, min(row * shard, n), min((row + 1) * shard, n)) for row in range(rows)]


def quantize_levels(
    x: Tensor,
    levels: Tensor,
    payload: Tensor,
    block: int,
    *,
    shard: int | None = None,
    unsent: Tensor | None,
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
        payload: uint8, ``level_bytes(shard, k, block)`` bytes, or a matrix with a row per shard:
            float32 scales, then codes, of which 8 of k bits are k bytes, the first code in the
            lowest bits; zeros elsewhere.
        block: 128, 256, 512, 1024 or 2048.
        shard: entries per row, a multiple of ``block``; the last rows may be short or empty. All
            rows have the places of a full one. None: all entries.
        unsent: float32, as many entries as ``x``; receives what is not sent. May be ``x``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Vargaftik et al., EDEN, 2022.
    """
    _check_levels("quantize_levels", levels)
    shard = x.numel() if shard is None else shard
    quantize_levels_op(x, _table(levels, x.device), payload, unsent, block, shard)


def dequantize_levels(
    payloads: Tensor,
    levels: Tensor,
    out: Tensor,
    block: int,
    *,
    shard: int | None = None,
    factor: float = 1.0,
) -> None:
    """Writes the sum of the decoded payloads, levels times the scales of their blocks.

    Args:
        payloads: uint8, shape (n, bytes), or (n, rows, bytes) with ``shard``; summed in their
            order.
        levels, block, shard: as for :func:`quantize_levels`.
        out: float32, contiguous, a multiple of ``block`` entries.
        factor: multiplies each sum.
    """
    _check_levels("dequantize_levels", levels)
    shard = out.numel() if shard is None else shard
    dequantize_levels_op(payloads, _table(levels, out.device), out, block, shard, factor)


def level_bytes(n: int, bits: int, block: int) -> int:
    """Returns the number of bytes of the payload of ``n`` entries, a multiple of 16."""
    blocks = -(-n // block)
    return -(-blocks * (4 + block * bits // 8) // 16) * 16


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
    return _known_table(levels, device)


@once_per_table
def _known_table(levels: Tensor, device: torch.device) -> Tensor:
    # A copy from the host is over when it returns. What is computed on a device is not: another
    # stream that takes it out of the cache would not wait for it.
    return _with_bounds(levels).to(device)


def _with_bounds(levels: Tensor) -> Tensor:
    return torch.cat([levels, (levels[1:] + levels[:-1]) / 2])


@op(
    "quantize_levels(Tensor x, Tensor table, Tensor(a!) payload, Tensor(b!)? unsent, int block,"
    " int shard) -> ()",
    same=[("x", "unsent")],
    takes={
        "x": Entries(torch.float32),
        "table": Entries(torch.float32),
        "payload": Entries(torch.uint8),
        "unsent": Entries(torch.float32, n="x"),
    },
)
def quantize_levels_op(
    x: Tensor, table: Tensor, payload: Tensor, unsent: Tensor | None, block: int, shard: int
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
    if unsent is not None:
        unsent.view(-1, block).copy_(rows - chosen * scale[:, None])
    messages = (payload if payload.dim() == 2 else payload[None]).zero_()
    for row, begin, end in even_rows(x.numel(), shard, len(messages)):
        scales, codes = _places(messages[row], _bits(levels), block, shard, end - begin)
        scales.copy_(scale[begin // block : end // block].view(torch.uint8))
        codes.copy_(_packed(nearest.flatten()[begin:end], _bits(levels)))


@op(
    "dequantize_levels(Tensor payloads, Tensor table, Tensor(a!) out, int block, int shard,"
    " float factor) -> ()",
    takes={
        "out": Entries(torch.float32),
        "table": Entries(torch.float32),
        "payloads": Entries(torch.uint8),
    },
)
def dequantize_levels_op(
    payloads: Tensor, table: Tensor, out: Tensor, block: int, shard: int, factor: float
) -> None:
    levels, _ = _split(table)
    bits = _bits(levels)
    messages = as_messages(payloads)
    for row, begin, end in even_rows(out.numel(), shard, messages.shape[1]):
        total = None
        for payload in messages[:, row]:
            stored, codes = _places(payload, bits, block, shard, end - begin)
            scales = stored.clone().view(torch.float32)  # bytes need not be aligned for float32
            groups = codes.view(-1, bits).long()
            words = (groups << 8 * torch.arange(bits, device=codes.device)).sum(1)
            numbers = (
                words[:, None] >> bits * torch.arange(8, device=codes.device) & (1 << bits) - 1
            )
            entries = levels[numbers].view(-1, block) * scales[:, None]
            total = entries if total is None else total + entries
        assert total is not None, "the check asks for a payload"
        out.view(-1)[begin:end] = total.flatten() * factor


def _places(payload: Tensor, bits: int, block: int, shard: int, n: int) -> tuple[Tensor, Tensor]:
    """Returns the bytes of the scales and of the codes of ``n`` entries of one row; views."""
    codes_at = shard // block * 4
    return payload[: n // block * 4], payload[codes_at : codes_at + n * bits // 8]


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
def _check_quantize(x: Tensor, table: Tensor, payload: Tensor, block: int, shard: int) -> None:
    _check("quantize_levels", "payload", x, table, payload, 1, block, shard)


@dequantize_levels_op.check
def _check_dequantize(payloads: Tensor, table: Tensor, out: Tensor, block: int, shard: int) -> None:
    _check("dequantize_levels", "payloads", out, table, payloads, 2, block, shard)


def _check(
    caller: str,
    name: str,
    x: Tensor,
    table: Tensor,
    payload: Tensor,
    least: int,
    block: int,
    shard: int,
) -> None:
    n = x.numel()
    if block not in _BLOCKS or n % block:
        raise ValueError(
            f"{caller}(block): one of {_BLOCKS} that divides the number of entries, "
            f"got {block} and {n} entries"
        )
    count = (table.numel() + 1) // 2
    if table.numel() % 2 == 0 or count not in _COUNTS:
        raise ValueError(f"{caller}(levels): 3, 7, 15 or 31 with bounds, got {table.numel()}")
    if not least <= payload.dim() <= least + 1 or not payload.shape[0]:
        raise ValueError(f"{caller}({name}): shape (..., bytes), got {tuple(payload.shape)}")
    rows = payload.shape[-2] if payload.dim() > least else 1
    if shard < 0 or shard % block or rows * shard < n:
        raise ValueError(
            f"{caller}(shard): a multiple of the block, {block}, whose {rows} rows hold {n} "
            f"entries, got {shard}"
        )
    nbytes = level_bytes(shard, count.bit_length() - 1, block)
    if payload.shape[-1] != nbytes:
        raise ValueError(
            f"{caller}({name}): {nbytes} bytes for {shard} entries, got {payload.shape[-1]}; "
            "see level_bytes"
        )


# Kernels --------------------------------------------------------------------------------------


@quantize_levels_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor, table: Tensor, payload: Tensor, unsent: Tensor | None, block: int, shard: int
) -> None:
    source = (x, x.numel(), block, max(shard, 1), math.sqrt(block), table)
    width = payload.shape[-1]
    rows = payload.numel() // max(width, 1)
    cpu.call("quantize_levels", (table.numel() + 1) // 2, *source, payload, rows, width, unsent)


@quantize_levels_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor, table: Tensor, payload: Tensor, unsent: Tensor | None, block: int, shard: int
) -> None:
    name, blocks = f"quantize_levels<{_bits(_split(table)[0])}>", x.numel() // block
    source = (x, blocks, block, max(shard // block, 1), math.sqrt(block), table)
    width = payload.shape[-1]
    rows = payload.numel() // max(width, 1)
    arguments = (*source, aligned(payload), rows, width, unsent)
    cuda.launch("levels.cu", name, x.device, blocks, arguments)


@dequantize_levels_op.kernel("cpu")
def _dequantize_cpu(
    payloads: Tensor, table: Tensor, out: Tensor, block: int, shard: int, factor: float
) -> None:
    source = (payloads, payloads.shape[0], payloads.stride(0), payloads.shape[-1])
    arguments = (*source, max(shard, 1), table, out.numel(), block, factor, out)
    cpu.call("dequantize_levels", (table.numel() + 1) // 2, *arguments)


@dequantize_levels_op.kernel("cuda")
def _dequantize_cuda(
    payloads: Tensor, table: Tensor, out: Tensor, block: int, shard: int, factor: float
) -> None:
    name, blocks = f"dequantize_levels<{_bits(_split(table)[0])}>", out.numel() // block
    source = (aligned(payloads), len(payloads), payloads.stride(0), payloads.shape[-1])
    shape = (max(shard // block, 1), table, blocks, block)
    arguments: tuple[Any, ...] = (*source, *shape, factor, out)
    cuda.launch("levels.cu", name, out.device, blocks, arguments)
