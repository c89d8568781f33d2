"""Quantises to affine 8-bit levels between a block's minimum and maximum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, Rule, op

__all__ = ["dequantize_affine", "quantize_affine"]

_TOP = 255  # the largest level
_TINY = 2.0**-120  # blocks whose levels are closer decode to zero
# Of CUDA kernels: rows of 32 entries that a warp keeps in registers; entries of a warp that finds a
# part of a range, and the number of parts.
_ROWS, _CHUNK, _MAX_CHUNKS = (8, 16, 32), 2048, 4096


def quantize_affine(x: Tensor, levels: Tensor, scale: Tensor, zero: Tensor, block: int) -> None:
    """Writes the level of each entry, and per block the distance of levels and the level of zero.

    The range of a block always includes zero, which is exactly a level. A block with an entry that
    is not finite has a distance of NaN, one of tiny entries a distance of 0. Kernels equal the
    definition bit for bit.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        levels: uint8, as many entries as ``x``.
        scale, zero: float32 and uint8, one entry per block: the distance, and the level of zero.
        block: entries per block, any number; the last block may be short.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    quantize_affine_op(x, levels, scale, zero, block)


def dequantize_affine(
    levels: Tensor,
    scale: Tensor,
    zero: Tensor,
    block: int,
    out: Tensor,
    *,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes the values of the levels, times ``factor``, to ``out``.

    Args:
        levels, scale, zero, block: as :func:`quantize_affine` wrote them.
        out: float32, float16 or bfloat16, contiguous.
        accumulate: adds to ``out`` instead.
    """
    dequantize_affine_op(levels, scale, zero, block, factor, accumulate, out)


def _blocks(levels: Tensor, block: int) -> int:
    return -(-levels.numel() // block)


_PAYLOAD: dict[str, Rule] = {
    "block": range(1, 2**63),
    "scale": Entries(torch.float32, n=_blocks),
    "zero": Entries(torch.uint8, n=_blocks),
}


@op(
    "quantize_affine(Tensor x, Tensor(a!) levels, Tensor(b!) scale, Tensor(c!) zero, int block)"
    " -> ()",
    takes={"x": Entries(FLOATS), "levels": Entries(torch.uint8, n="x"), **_PAYLOAD},
)
def quantize_affine_op(x: Tensor, levels: Tensor, scale: Tensor, zero: Tensor, block: int) -> None:
    n = x.numel()
    block = max(1, min(block, n))  # padding to a block of 2^62 entries would need its memory
    rows = pad(x.flatten().to(torch.float32), (0, -n % block)).view(-1, block)
    finite = rows.isfinite().all(1)
    rows = torch.where(finite[:, None], rows, 0.0)
    # Zero is in the range, so that gradients of zero stay zero and the padding changes nothing.
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    top = torch.full_like(low, _TOP)
    distance = high / top - low / top  # high - low may overflow
    # The inverse of a tiny distance would overflow; such a block decodes to zeros.
    tiny = distance < _TINY
    inverse = torch.where(tiny, 0.0, 1.0 / torch.where(tiny, 1.0, distance))
    middle = torch.round(-low * inverse).clamp(0, _TOP)
    # Clamped after the sum: both terms are rounded, so the largest entry may come out as 256.
    nearest = (torch.round(rows * inverse[:, None]) + middle[:, None]).clamp(0, _TOP)
    levels.copy_(nearest.flatten()[:n].view(levels.shape))
    scale.copy_(torch.where(finite, torch.where(tiny, 0.0, distance), torch.nan))
    zero.copy_(middle)


@op(
    "dequantize_affine(Tensor levels, Tensor scale, Tensor zero, int block, float factor,"
    " bool accumulate, Tensor(a!) out) -> ()",
    takes={"out": Entries(FLOATS), "levels": Entries(torch.uint8, n="out"), **_PAYLOAD},
)
def dequantize_affine_op(
    levels: Tensor,
    scale: Tensor,
    zero: Tensor,
    block: int,
    factor: float,
    accumulate: bool,
    out: Tensor,
) -> None:
    n = levels.numel()
    block = max(1, min(block, n))
    rows = pad(levels.flatten().to(torch.float32), (0, -n % block)).view(-1, block)
    entries = (rows - zero.to(torch.float32)[:, None]) * scale[:, None]
    entries = (entries.flatten()[:n] * factor).view(out.shape)
    out.copy_(out.to(torch.float32) + entries if accumulate else entries)


# Kernels ---------------------------------------------------------------------------------------


@quantize_affine_op.kernel("cpu")
def _quantize_cpu(x: Tensor, levels: Tensor, scale: Tensor, zero: Tensor, block: int) -> None:
    arguments = (x, x.numel(), block, levels, scale, zero)
    cpu.call("quantize_affine", cpu.DTYPES[x.dtype], *arguments)


@quantize_affine_op.kernel("cuda")
def _quantize_cuda(x: Tensor, levels: Tensor, scale: Tensor, zero: Tensor, block: int) -> None:
    n, t, blocks = x.numel(), cuda.DTYPES[x.dtype], scale.numel()
    block = max(1, min(block, n))  # kernels add `n` and `block`, which may overflow
    for rows in _ROWS:
        if block <= 32 * rows:
            name = f"affine_blocks<{t}, {rows}>"
            arguments = (x, n, block, scale, zero, levels)
            cuda.launch("affine.cu", name, x.device, blocks, arguments)
            return
    # The range of a long block is found by several warps. Their results go through memory: a kernel
    # cannot wait for all of its blocks. Not more chunks than the next launch reads in no time.
    chunk = _CHUNK * -(-block // (_CHUNK * _MAX_CHUNKS))
    chunks = -(-block // chunk)
    extents = torch.empty(3 * chunks * blocks, dtype=torch.float32, device=x.device)
    each = 8 if chunks > 64 else 1  # warps that read the chunks of a block
    for name, warps, launched in (
        (f"affine_extents<{t}>", chunks * blocks, (x, n, block, chunk, chunks, extents)),
        (f"affine_scales<{each}>", each * blocks, (extents, chunks, blocks, scale, zero)),
        (f"affine_levels<{t}>", n // 256 + 1, (x, n, block, scale, zero, levels)),
    ):
        cuda.launch("affine.cu", name, x.device, warps, launched)


@dequantize_affine_op.kernel("cpu")
def _dequantize_cpu(levels: Tensor, scale: Tensor, zero: Tensor, block: int, *rest: Any) -> None:
    dtype = cpu.DTYPES[rest[-1].dtype]  # of ``out``
    cpu.call("dequantize_affine", dtype, levels, levels.numel(), block, scale, zero, *rest)


@dequantize_affine_op.kernel("cuda")
def _dequantize_cuda(levels: Tensor, scale: Tensor, zero: Tensor, block: int, *rest: Any) -> None:
    n, name = levels.numel(), f"affine_entries<{cuda.DTYPES[rest[-1].dtype]}>"
    block = max(1, min(block, n))  # the kernel divides by it as a 32-bit number
    arguments = (levels, n, block, scale, zero, *rest)
    cuda.launch("affine.cu", name, levels.device, n // 256 + 1, arguments)
