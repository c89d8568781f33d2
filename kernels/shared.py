"""Quantises to integers with a scale that all ranks share; an all-reduce can add the codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import philox
from .runtime import cpu, cuda
from .runtime.op import FEEDBACK, FLOATS, Entries, op

__all__ = ["dequantize_shared", "largest_magnitudes", "quantize_shared"]

_GRAIN = 256  # blocks are multiples of it, so that a warp's 256 entries have one scale
_CHUNK = 2048  # most entries of a warp that finds a largest magnitude
_INFINITY, _NAN = 0x7F800000, 0x7FC00000  # bits of infinity and of NaN
_TINY = (127 - 120) << 23  # bits of 2^-120; blocks below it decode to zero


def largest_magnitudes(
    x: Tensor, out: Tensor, block: int, *, residual: Tensor | None = None
) -> None:
    """Writes the bits of the largest magnitude of each block of ``x``, or of ``x + residual``.

    As integers, these bits order as the numbers do, with infinity and NaN last. An all-reduce of
    integers therefore finds the largest over ranks without dropping NaN, as a maximum of floats
    may. Kernels equal the definition bit for bit.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        out: int32, one entry per block.
        block: entries per block, a multiple of 256; the last block may be short.
        residual: float32, as many entries as ``x``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    magnitudes_op(x, residual, out, block)


def quantize_shared(
    x: Tensor,
    magnitudes: Tensor,
    codes: Tensor,
    block: int,
    levels: int,
    *,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Writes ``x``, or ``x + residual``, as integers with a scale per block.

    The scale is the magnitude of the block over ``levels``. Larger entries are clipped. A block
    whose magnitude is not finite decodes to NaN.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        magnitudes: int32, the bits of one magnitude per block, as :func:`largest_magnitudes` writes
            them.
        codes: int8, as many entries as ``x``; from ``-levels`` to ``levels``.
        block: entries per block, a multiple of 256; the last block may be short.
        levels: 1 to 127. With 127 // n, the sum over n ranks fits into int8.
        residual: float32, as many entries as ``x``.
        unsent: float32, as many entries as ``x``; receives what the codes leave out. May be
            ``residual``.
        random: bits for stochastic rounding. None rounds to nearest.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Mishchenko et al., IntSGD, 2022; Xin et al., Global-QSGD, 2023.
    """
    key = philox.key_of("quantize_shared", random)
    quantize_shared_op(x, residual, magnitudes, codes, unsent, block, levels, *key)


def dequantize_shared(
    codes: Tensor, magnitudes: Tensor, out: Tensor, block: int, levels: int, *, factor: float = 1.0
) -> None:
    """Writes the values of codes, or of sums of codes, times ``factor``.

    Args:
        codes, magnitudes, block, levels: as for :func:`quantize_shared`.
        out: float32, float16 or bfloat16, contiguous.
        factor: multiplies the result; 1 over the number of ranks gives the mean.
    """
    dequantize_shared_op(codes, magnitudes, out, block, levels, factor)


def _blocks(x: Tensor, block: int) -> int:
    return -(-x.numel() // block)


def _blocks_of_codes(codes: Tensor, block: int) -> int:
    return _blocks(codes, block)


_BLOCK, _LEVELS = range(_GRAIN, 2**63, _GRAIN), range(1, 128)


@op(
    "largest_magnitudes(Tensor x, Tensor? residual, Tensor(a!) out, int block) -> ()",
    takes={
        "block": _BLOCK,
        "x": Entries(FLOATS),
        "residual": Entries(torch.float32, n="x"),
        "out": Entries(torch.int32, n=_blocks),
    },
)
def magnitudes_op(x: Tensor, residual: Tensor | None, out: Tensor, block: int) -> None:
    c = _corrected(x, residual)
    block = max(1, min(block, c.numel()))
    bits = pad(c, (0, -c.numel() % block)).view(torch.int32) & 0x7FFFFFFF
    bits = torch.where(bits > _INFINITY, _NAN, bits)  # one NaN, whichever rank it came from
    out.copy_(bits.view(-1, block).amax(1) if c.numel() else bits)


@op(
    "quantize_shared(Tensor x, Tensor? residual, Tensor magnitudes, Tensor(a!) codes,"
    " Tensor(b!)? unsent, int block, int levels, Tensor? step, int seed, int stream, int first)"
    " -> ()",
    same=[("residual", "unsent")],
    takes={
        "block": _BLOCK,
        "levels": _LEVELS,
        "x": Entries(FLOATS),
        "magnitudes": Entries(torch.int32, n=_blocks),
        "codes": Entries(torch.int8, n="x"),
        **FEEDBACK,
    },
)
def quantize_shared_op(
    x: Tensor,
    residual: Tensor | None,
    magnitudes: Tensor,
    codes: Tensor,
    unsent: Tensor | None,
    block: int,
    levels: int,
    step: Tensor | None,
    *key: int,
) -> None:
    c = _corrected(x, residual)
    n = c.numel()
    level, inverse = _scales(magnitudes, levels, n, block)
    units = c * inverse
    # Not clamp(), which keeps NaN: its conversion to an integer differs between processors. Here
    # NaN becomes the largest code; the magnitude says that the block is not finite.
    units = torch.where(units < levels, units, float(levels))
    units = torch.where(units > -levels, units, -float(levels))
    # Noise comes after the clipping and is below a half, so codes stay within the levels.
    if step is not None:
        noise = philox.half_words(n, int(step), *key, device=x.device)
        units = units + philox.centred(noise)
    rounded = torch.round(units)
    codes.view(-1).copy_(rounded.to(torch.int8))
    if unsent is not None:
        # -0 + 0 is 0, as in the kernels, which round by adding and subtracting a large number.
        unsent.view(-1).copy_(c - (rounded + 0.0) * level)


@op(
    "dequantize_shared(Tensor codes, Tensor magnitudes, Tensor(a!) out, int block, int levels,"
    " float factor) -> ()",
    takes={
        "block": _BLOCK,
        "levels": _LEVELS,
        "out": Entries(FLOATS),
        "codes": Entries(torch.int8, n="out"),
        "magnitudes": Entries(torch.int32, n=_blocks_of_codes),
    },
)
def dequantize_shared_op(
    codes: Tensor, magnitudes: Tensor, out: Tensor, block: int, levels: int, factor: float
) -> None:
    level, _ = _scales(magnitudes, levels, codes.numel(), block)
    entries = codes.flatten().to(torch.float32) * level * factor
    out.view(-1).copy_(entries)


def _corrected(x: Tensor, residual: Tensor | None) -> Tensor:
    c = x.flatten().to(torch.float32)
    return c if residual is None else c + residual.flatten()


def _scales(magnitudes: Tensor, levels: int, n: int, block: int) -> tuple[Tensor, Tensor]:
    """Returns the value of a level and its inverse, for each of ``n`` entries."""
    values, finite = magnitudes.view(torch.float32), magnitudes < _INFINITY
    # A tensor: torch divides a number by a tensor with other bits (docs/design/kernels.md).
    top = torch.full_like(values, levels)
    level = torch.where(finite, values / top, torch.nan)
    inverse = torch.where(finite & (magnitudes >= _TINY), top / values, 0.0)
    block = max(1, min(block, n))
    return level.repeat_interleave(block)[:n], inverse.repeat_interleave(block)[:n]


quantize_shared_op.check(philox.check_key)


# Kernels --------------------------------------------------------------------------------------


@magnitudes_op.kernel("cpu")
def _magnitudes_cpu(x: Tensor, residual: Tensor | None, out: Tensor, block: int) -> None:
    arguments = (x, residual, x.numel(), block, out)
    cpu.call("largest_magnitudes", cpu.DTYPES[x.dtype], *arguments)


@magnitudes_op.kernel("cuda")
def _magnitudes_cuda(x: Tensor, residual: Tensor | None, out: Tensor, block: int) -> None:
    name, n = f"largest_magnitudes<{cuda.DTYPES[x.dtype]}>", x.numel()
    block = _within(n, block)
    chunk = min(block, _CHUNK)
    if chunk < block:
        out.zero_()  # several warps find the largest of a block
    arguments = (x, residual, n, block, chunk, out)
    cuda.launch("shared.cu", name, x.device, -(-block // chunk) * out.numel(), arguments)


@quantize_shared_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor,
    residual: Tensor | None,
    magnitudes: Tensor,
    codes: Tensor,
    unsent: Tensor | None,
    block: int,
    levels: int,
    *key: Any,
) -> None:
    arguments = (x, residual, x.numel(), block, magnitudes, float(levels), *key, codes, unsent)
    cpu.call("quantize_shared", cpu.DTYPES[x.dtype], *arguments)


@quantize_shared_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor,
    residual: Tensor | None,
    magnitudes: Tensor,
    codes: Tensor,
    unsent: Tensor | None,
    block: int,
    levels: int,
    *key: Any,
) -> None:
    name, n = f"quantize_shared<{cuda.DTYPES[x.dtype]}>", x.numel()
    scale = (_within(n, block), magnitudes, float(levels))
    arguments = (x, residual, n, *scale, *key, codes, unsent)
    cuda.launch("shared.cu", name, x.device, n // 256 + 1, arguments)


@dequantize_shared_op.kernel("cpu")
def _dequantize_cpu(
    codes: Tensor, magnitudes: Tensor, out: Tensor, block: int, levels: int, factor: float
) -> None:
    arguments = (codes, out.numel(), block, magnitudes, float(levels), factor, out)
    cpu.call("dequantize_shared", cpu.DTYPES[out.dtype], *arguments)


@dequantize_shared_op.kernel("cuda")
def _dequantize_cuda(
    codes: Tensor, magnitudes: Tensor, out: Tensor, block: int, levels: int, factor: float
) -> None:
    name, n = f"dequantize_shared<{cuda.DTYPES[out.dtype]}>", out.numel()
    arguments = (codes, n, _within(n, block), magnitudes, float(levels), factor, out)
    cuda.launch("shared.cu", name, out.device, n // 256 + 1, arguments)


def _within(n: int, block: int) -> int:
    """Returns ``block``, or the shortest block that holds all ``n`` entries if that is shorter."""
    # Kernels divide by block / 256 as a 32-bit number, which is 0 for a block of 2^40 entries.
    return min(block, max(1, -(-n // _GRAIN)) * _GRAIN)
