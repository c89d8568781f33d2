"""Quantises at random to levels of each block's Euclidean norm, as QSGD does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import philox
from ._blockwise import Payload, layout_of, one_segment
from .blockwise import aligned
from .levels import root_of, summed
from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, op

__all__ = ["quantize_norms"]

_INFINITY = 0x7F800000  # bits of infinity
_TINY = (127 - 120) << 23  # bits of 2^-120; blocks below it decode to zero


def quantize_norms(
    x: Tensor, payload: Tensor, block: int, levels: int, random: philox.RandomBits
) -> None:
    """Writes ``x`` as 8-bit integers in units of its block's norm over ``levels``.

    Rounds up or down at random, which is unbiased. A block with an entry that is not finite decodes
    to NaN. Kernels equal the definition bit for bit: squares are added per place in rows of 32,
    then halves to halves.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        payload: uint8, ``payload_bytes(segments, "int8", block)`` entries; ``dequantize`` decodes
            it as "int8" with these segments, ``segments_for("int8", block, [[n]], whole=True)``.
        block: entries per norm, a power of two from 32 to 2048.
        levels: 1 to 127, the code of an entry as large as the norm.
        random: bits for the rounding.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Alistarh et al., QSGD, 2017.
    """
    quantize_norms_op(x, payload, block, levels, *philox.key_of("quantize_norms", random))


@lru_cache(maxsize=4096)  # one per bucket, which is asked for in every step
def _layout(n: int, block: int) -> Payload:
    layout_of("quantize_norms", "int8", block, 0)  # checks the block
    slots = one_segment("int8", block, n, whole=True).slots
    return layout_of("quantize_norms", "int8", block, slots)


def _nbytes(x: Tensor, block: int) -> int:
    return _layout(x.numel(), block).bytes


@op(
    "quantize_norms(Tensor x, Tensor(a!) payload, int block, int levels, Tensor step, int seed,"
    " int stream, int first) -> ()",
    takes={
        "levels": range(1, 128),
        "x": Entries(FLOATS),
        "payload": Entries(torch.uint8, n=_nbytes),
    },
)
def quantize_norms_op(
    x: Tensor, payload: Tensor, block: int, levels: int, step: Tensor, *key: int
) -> None:
    n = x.numel()
    layout = _layout(n, block)
    rows = pad(x.flatten().to(torch.float32), (0, -n % block)).view(-1, block)
    largest = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1)
    good = (largest >= _TINY) & (largest < _INFINITY)
    unit = torch.where(good, largest.view(torch.float32), 1.0)
    # Divided by the largest magnitude first: squares of float32 entries may overflow or vanish.
    y = torch.where(good[:, None], rows * (1.0 / unit)[:, None], 0.0)
    root = root_of(torch.where(good, summed(y * y), 1.0))
    top = torch.full_like(root, levels)  # a tensor: torch divides numbers by tensors otherwise
    scale = torch.where(good, unit * (root / top), 0.0)
    scale = torch.where(largest >= _INFINITY, torch.nan, scale)
    # Within the levels, but for rounding errors.
    places = (y * (top / root)[:, None]).clamp(-levels, levels)
    noise = philox.half_words(rows.numel(), int(step), *key, device=x.device)
    codes = (places + philox.centred(noise).view_as(places)).round().to(torch.int8).flatten()
    payload.zero_()
    payload[: 4 * len(scale)] = scale.view(torch.uint8)
    payload[layout.codes_at : layout.codes_at + n] = codes[:n].view(torch.uint8)


quantize_norms_op.check(philox.check_key)


@quantize_norms_op.kernel("cpu")
def _quantize_cpu(x: Tensor, payload: Tensor, block: int, levels: int, *key: Any) -> None:
    layout = _layout(x.numel(), block)
    settings = (cpu.DTYPES[x.dtype], x, x.numel(), block, float(levels))
    cpu.call("quantize_norms", *settings, *key, payload, layout.codes_at, layout.bytes)


@quantize_norms_op.kernel("cuda")
def _quantize_cuda(x: Tensor, payload: Tensor, block: int, levels: int, *key: Any) -> None:
    layout = _layout(x.numel(), block)
    name = f"quantize_norms<{cuda.DTYPES[x.dtype]}, {block}>"
    arguments = (x, x.numel(), float(levels), *key, aligned(payload), layout.codes_at, layout.bytes)
    warps = layout.n // max(block, 256) + 1
    cuda.launch("norms.cu", name, x.device, warps, arguments)
