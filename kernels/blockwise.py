"""Quantises in blocks: one scale per block, one code of 1 to 8 bits per entry.

A payload is one uint8 tensor: scales, then codes, padded with zeros to a multiple of 16 bytes.
``docs/design/kernels.md`` has the table of formats. Kernels equal the definitions bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _blockwise_definition as definition
from . import philox
from ._blockwise_checks import check_feedback, check_message, check_messages, rows_in
from ._blockwise_formats import ALIGNMENT, FORMATS, Payload, layout_of, payload_bytes
from .runtime import cpu, cuda
from .runtime.op import check, op

__all__ = ["FORMATS", "dequantize", "payload_bytes", "quantize"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    *,
    shard: int | None = None,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Writes the payload of ``x``, or of ``x + residual``, and what the payload leaves out.

    With ``shard``, row r of ``payload`` receives the payload of the entries from ``r * shard`` on:
    a message for all ranks in one pass.

    Args:
        x: float32, float16 or bfloat16, contiguous; worked on as float32.
        payload: uint8, ``payload_bytes(x.numel(), format, block)`` entries; with ``shard`` a matrix
            of rows of ``payload_bytes(shard, format, block)``, of which the last may be short or
            empty, and are filled with zeros.
        format: a key of ``FORMATS``.
        block: entries per scale.
        shard: entries per row, a multiple of ``block``. None: all in one payload.
        residual: float32, as many entries as ``x``; added before quantising.
        unsent: float32, as many entries as ``x``; receives what was not sent. May be ``residual``.
        random: bits for stochastic rounding, which is unbiased except for "sign" and for formats
            whose scale is a power of two ("mx_..."). None rounds to nearest. Row r of a message
            takes ``random.row(r)``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Example:
        >>> payload = torch.empty(payload_bytes(grad.numel(), "int8", 256), dtype=torch.uint8)
        >>> quantize(grad, payload, "int8", 256)
        >>> dequantize(payload[None], grad, "int8", 256)
    """
    shard = x.numel() if shard is None else shard
    key = philox.key_of("quantize", random)
    quantize_op(x, payload, format, block, shard, residual, unsent, *key)


def dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    *,
    shard: int | None = None,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes the sum of the decoded payloads, times ``factor``, to ``out``.

    Args:
        payloads: uint8, shape (n, bytes) with n >= 1, or (n, rows, bytes) with ``shard``; summed in
            their order, in float32.
        out: float32, float16 or bfloat16, contiguous.
        shard: entries per row, see :func:`quantize`. None: a payload holds all entries.
        accumulate: adds to ``out`` instead. With ``factor=-1`` and one payload, ``out`` becomes
            what the payload leaves out of it.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    shard = out.numel() if shard is None else shard
    dequantize_op(payloads, out, format, block, shard, factor, accumulate)


# Quantise -------------------------------------------------------------------------------------


@op(
    "quantize(Tensor x, Tensor(a!) payload, str format, int block, int shard, Tensor? residual,"
    " Tensor(b!)? unsent, Tensor? step, int seed, int stream, int first) -> ()",
    same=[("residual", "unsent")],
)
def quantize_op(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    shard: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    layout = Payload(FORMATS[format], block, shard)
    c = x.to(torch.float32).flatten()  # scales of 16-bit gradients are float32 as well
    if residual is not None:
        c = c + residual.flatten()
    for row, begin, end in definition.rows_of(x.numel(), shard, rows_in(payload)):
        noise, key = None, (seed, stream, first + row * philox.ROW)
        if step is not None:
            noise = philox.half_words(end - begin, int(step), *key, device=x.device)
        into = payload.view(-1)[row * layout.bytes : (row + 1) * layout.bytes]
        left_out = definition.encode(c[begin:end], into, layout, noise)
        if unsent is not None:
            unsent.view(-1)[begin:end] = left_out


# Dequantise -----------------------------------------------------------------------------------


@op(
    "dequantize(Tensor payloads, Tensor(a!) out, str format, int block, int shard, float factor,"
    " bool accumulate) -> ()"
)
def dequantize_op(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    shard: int,
    factor: float,
    accumulate: bool,
) -> None:
    layout = Payload(FORMATS[format], block, shard)
    rows = as_messages(payloads)
    for row, begin, end in definition.rows_of(out.numel(), shard, rows.shape[1]):
        total = definition.sum_payloads(rows[:, row], layout, end - begin) * factor
        here = out.view(-1)[begin:end]
        here.copy_(here.to(torch.float32) + total if accumulate else total)


def as_messages(payloads: Tensor) -> Tensor:
    """Returns payloads as (payloads, rows of a message, bytes); a view."""
    return payloads if payloads.dim() == 3 else payloads[:, None]


# Checks of arguments -------------------------------------------------------------------------


@quantize_op.check
def _check_quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    shard: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    *key: int,
) -> None:
    n = x.numel()
    check("quantize", "x", x, like=x, dtypes=_DTYPES)
    check_message("quantize", payload, format, block, shard, n, x)
    check_feedback("quantize", x, n, residual, unsent)
    philox.check_key(x, step, *key)


@dequantize_op.check
def _check_dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    shard: int,
    factor: float,
    accumulate: bool,
) -> None:
    check("dequantize", "out", out, like=payloads, dtypes=_DTYPES)
    check_messages("dequantize", payloads, format, block, shard, out.numel())


# Kernels --------------------------------------------------------------------------------------


@quantize_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor, payload: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout = layout_of("quantize", format, block, shard)
    numbers = (layout.format.number, cpu.DTYPES[x.dtype], block)
    source = (x, x.numel(), shard, rows_in(payload))
    cpu.call("quantize", *numbers, *source, *rest, *parts(payload, layout))


@quantize_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor, payload: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout, rows = layout_of("quantize", format, block, shard), rows_in(payload)
    # The block is a template argument, so that a lane's entries stay in registers: an array is kept
    # there only where every index is known to the compiler.
    name = f"quantize<{layout.format.cpp}, {cuda.DTYPES[x.dtype]}, {block}>"
    arguments = (x, x.numel(), shard, *rest, *parts(aligned(payload), layout))
    cuda.launch("blockwise.cu", name, x.device, shard // warp_entries(block) + 1, arguments, rows)


def warp_entries(block: int) -> int:
    """Returns the entries that a warp encodes at a time."""
    # 256 at least, which share calls of Philox. Of a longer block a warp takes 512, which are 16
    # registers of a lane; the warps of a block meet in shared memory.
    return min(max(block, 256), 512)


def parts(payload: Tensor, layout: Payload) -> tuple[Tensor, int, int]:
    """Returns the arguments by which kernels take a payload that they write."""
    return payload, layout.codes_at, layout.bytes


def aligned(payload: Tensor) -> Tensor:
    """Returns the payload; raises ValueError unless it is aligned for CUDA kernels."""
    if payload.data_ptr() % ALIGNMENT:
        raise ValueError(f"a payload on CUDA starts at a multiple of {ALIGNMENT} bytes")
    return payload


@dequantize_op.kernel("cpu")
def _dequantize_cpu(
    payloads: Tensor, out: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout = layout_of("dequantize", format, block, shard)
    numbers = (layout.format.number, cpu.DTYPES[out.dtype])
    source = source_of(payloads, layout, out.numel())
    cpu.call("dequantize", *numbers, *source, rows_in(payloads[0]), block, *rest, out)


@dequantize_op.kernel("cuda")
def _dequantize_cuda(
    payloads: Tensor, out: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout = layout_of("dequantize", format, block, shard)
    # Decoding needs no maximum, so the block is an argument and one kernel serves all blocks.
    name = f"dequantize<{layout.format.cpp}, {cuda.DTYPES[out.dtype]}>"
    source = source_of(aligned(payloads), layout, out.numel())
    arguments, rows = (*source, block, *rest, out), rows_in(payloads[0])
    cuda.launch("blockwise.cu", name, out.device, shard // 256 + 1, arguments, rows)


def source_of(payloads: Tensor, layout: Payload, n: int) -> tuple[Tensor | int, ...]:
    """Returns the arguments by which kernels take payloads to decode."""
    strides = (layout.codes_at, layout.bytes, payloads.stride(0), len(payloads))
    return (payloads, *strides, n, layout.n)
