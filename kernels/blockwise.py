"""Quantises in blocks: one scale per block, one code of 1 to 8 bits per entry.

A payload is one uint8 tensor: scales, then codes, then entries of 16 bits, padded with zeros to a
multiple of 16 bytes. Blocks begin at segments, see ``segments.py``.
``docs/design/kernels.md`` has the table of formats. Kernels equal the definitions bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _blockwise_definition as definition
from . import philox
from ._blockwise import (
    ALIGNMENT,
    FORMATS,
    Payload,
    check_draws,
    check_form,
    check_message,
    check_messages,
    layout_for,
    message_of,
    one_segment,
    payload_bytes,
    segments_for,
)
from ._tables import on_device
from ._torch import constant_result
from .runtime import cpu, cuda
from .runtime.arguments import as_tensor, check_whole
from .runtime.op import FEEDBACK, FLOATS, Entries, op
from .segments import Segments, rows_of, segments_of

__all__ = ["FORMATS", "dequantize", "payload_bytes", "quantize", "segments_for"]


def quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    *,
    segments: Segments | None = None,
    row: int = -1,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Writes the payload of ``x``, or of ``x + residual``, and what the payload leaves out.

    Args:
        x: float32, float16 or bfloat16, contiguous; worked on as float32.
        payload: uint8, ``payload_bytes(segments, format, block)`` entries, or a matrix with such a
            row for each row of ``segments``: a message for all ranks in one pass.
        format: a key of ``FORMATS``.
        block: entries per scale.
        segments: where blocks begin, of ``segments_for(format, block, ...)``. None: ``x`` is one
            segment.
        row: ``x`` and ``payload`` are this row of the message; -1: the whole message.
        residual: float32, as many entries as ``x``; added before quantising.
        unsent: float32, as many entries as ``x``; receives what was not sent. May be ``residual``.
        random: bits for stochastic rounding, which is unbiased except for "sign" and for formats
            whose scale is a power of two ("mx_..."). None rounds to nearest. Row r of a message
            takes ``random.row(r)``. "dithered_int8" needs them, the same on all ranks.
        rank, ranks: "dithered_int8" shifts the draws of rank i of n by i / n of their range, and
            ``dequantize`` expects the payloads of all n in their order.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Example:
        >>> payload = torch.empty(payload_bytes(grad.numel(), "int8", 256), dtype=torch.uint8)
        >>> quantize(grad, payload, "int8", 256)
        >>> dequantize(payload[None], grad, "int8", 256)
    """
    table = table_for("quantize", segments, format, block, x)
    key = philox.key_of("quantize", random)
    quantize_op(x, payload, format, block, table, row, residual, unsent, *key, rank, ranks)


def dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    *,
    segments: Segments | None = None,
    row: int = -1,
    factor: float = 1.0,
    accumulate: bool = False,
    random: philox.RandomBits | None = None,
) -> None:
    """Writes the sum of the decoded payloads, times ``factor``, to ``out``.

    Args:
        payloads: uint8, shape (n, bytes) with n >= 1, or (n, rows, bytes) with ``segments``; summed
            in their order, in float32.
        out: float32, float16 or bfloat16, contiguous.
        segments, row: as for :func:`quantize`.
        accumulate: adds to ``out`` instead. With ``factor=-1`` and one payload, ``out`` becomes
            what the payload leaves out of it.
        random: the bits that encoded "dithered_int8"; None for other formats. Payload i of n is of
            rank i of n: a payload of several cannot be decoded alone.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    table = table_for("dequantize", segments, format, block, out)
    key = philox.key_of("dequantize", random)
    dequantize_op(payloads, out, format, block, table, row, factor, accumulate, *key)


def table_for(
    caller: str,
    segments: Segments | None,
    format: str,
    block: int,
    x: Any,
    *,
    whole: bool = False,
) -> Tensor:
    """Returns the table, which ops take: a schema of torch.library has no type for `Segments`."""
    if segments is None:
        check_form(caller, format, block)
        n = as_tensor(caller, "x", x).numel()
        return _table(format, int(block), n, whole)
    if not isinstance(segments, Segments):
        raise TypeError(f"{caller}(segments): Segments or None, got {type(segments).__name__}")
    return segments.table


@constant_result
def _table(format: str, block: int, n: int, whole: bool) -> Tensor:
    return one_segment(format, block, n, whole).table


# Quantise -------------------------------------------------------------------------------------


@op(
    "quantize(Tensor x, Tensor(a!) payload, str format, int block, Tensor table, int row,"
    " Tensor? residual, Tensor(b!)? unsent, Tensor? step, int seed, int stream, int first,"
    " int rank, int ranks) -> ()",
    same=[("residual", "unsent")],
    takes={
        "table": segments_of,
        "x": Entries(FLOATS),
        "payload": Entries(torch.uint8),
        **FEEDBACK,
        "ranks": range(1, 2**31),
    },
)
def quantize_op(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
    rank: int,
    ranks: int,
) -> None:
    segments = segments_of(table, "quantize")
    layout = layout_for(table, "quantize", format, block)
    c = x.to(torch.float32).flatten()  # scales of 16-bit gradients are float32 as well
    if residual is not None:
        c = c + residual.flatten()
    payload.zero_()  # the padding is sent, and equal gradients give equal bytes
    rows = rows_of(segments, row)
    into = payload.view(len(rows), layout.bytes)
    for number, (index, begin, end) in enumerate(rows):
        noise: tuple[Tensor | None, Tensor | None] = (None, None)
        if step is not None:
            key = (int(step), seed, stream, first + number * philox.ROW)
            noise = _noise(layout, *key, rank, ranks, device=x.device)
        left_out = definition.encode_row(
            c[begin:end], into[number], layout, segments, index, *noise
        )
        if unsent is not None:
            unsent.view(-1)[begin:end] = left_out


def _noise(
    layout: Payload,
    step: int,
    seed: int,
    stream: int,
    first: int,
    rank: int,
    ranks: int,
    *,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Returns the random bits that round the slots of a row, and half-words for 16-bit entries."""
    key = (step, seed, stream)
    tails = philox.half_words(layout.tails, *key, first + layout.n, device=device)
    if not layout.format.dithered:
        return philox.half_words(layout.n, *key, first, device=device), tails
    draws = philox.dither(layout.n, *key, first, rank=rank, ranks=ranks, device=device)
    # The bits are those of all ranks: shifted, too, errors of equal gradients cancel.
    return draws, tails + (rank * (2**32 // ranks) >> 16) & 0xFFFF


# Dequantise -----------------------------------------------------------------------------------


@op(
    "dequantize(Tensor payloads, Tensor(a!) out, str format, int block, Tensor table, int row,"
    " float factor, bool accumulate, Tensor? step, int seed, int stream, int first) -> ()",
    takes={"table": segments_of, "out": Entries(FLOATS), "payloads": Entries(torch.uint8)},
)
def dequantize_op(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    factor: float,
    accumulate: bool,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    segments = segments_of(table, "dequantize")
    layout = layout_for(table, "dequantize", format, block)
    rows = as_messages(payloads)
    for number, (index, begin, end) in enumerate(rows_of(segments, row)):
        some, at = rows[:, number], first + number * philox.ROW
        draws = draws_of(layout, len(some), step, seed, stream, at, device=out.device)
        total = definition.decode_row(some, layout, segments, index, draws) * factor
        here = out.view(-1)[begin:end]
        here.copy_(here.to(torch.float32) + total if accumulate else total)


def draws_of(
    layout: Payload,
    ranks: int,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
    *,
    device: torch.device,
) -> list[Tensor] | None:
    """Returns the dither of each rank's payload; None without a step, and for other formats."""
    if step is None:
        return None
    key = (layout.n, int(step), seed, stream, first)
    return [philox.dither(*key, rank=i, ranks=ranks, device=device) for i in range(ranks)]


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
    table: Tensor,
    row: int,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
    rank: int,
    ranks: int,
) -> None:
    check_message("quantize", payload, format, block, table, row, x.numel())
    philox.check_key(x, step, seed, stream, first)
    check_draws("quantize", format, step, encoder=True)
    check_whole("quantize", "rank", rank, 0, ranks)


@dequantize_op.check
def _check_dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    step: Tensor | None,
    *key: int,
) -> None:
    check_messages("dequantize", payloads, format, block, table, row, out.numel())
    philox.check_key(payloads, step, *key)
    check_draws("dequantize", format, step)


# Kernels --------------------------------------------------------------------------------------


@quantize_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor, payload: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    message = message_of(table, "quantize", format, block, row)
    numbers = (message.layout.format.number, cpu.DTYPES[x.dtype], block)
    cpu.call("quantize", *numbers, x, table, row, *rest, payload, *message.places)


@quantize_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor, payload: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    layout, rows, *_, places = message_of(table, "quantize", format, block, row)
    # The block is a template argument, so that a lane's entries stay in registers: an array is kept
    # there only where every index is known to the compiler.
    name = f"quantize<{layout.format.cpp}, {cuda.DTYPES[x.dtype]}, {block}>"
    device_table = on_device(table, x.device)
    arguments = (x, device_table, row, *rest, aligned(payload), *places)
    warps = (layout.n + layout.tails) // warp_entries(block) + 1
    cuda.launch("blockwise.cu", name, x.device, warps, arguments, rows)


def warp_entries(block: int) -> int:
    """Returns the entries that a warp encodes at a time."""
    # 256 at least, which share calls of Philox. Of a longer block a warp takes 512, which are 16
    # registers of a lane; the warps of a block meet in shared memory.
    return min(max(block, 256), 512)


def aligned(payload: Tensor) -> Tensor:
    """Returns the payload; raises ValueError unless it is aligned for CUDA kernels."""
    if payload.data_ptr() % ALIGNMENT:
        raise ValueError(f"a payload on CUDA starts at a multiple of {ALIGNMENT} bytes")
    return payload


@dequantize_op.kernel("cpu")
def _dequantize_cpu(
    payloads: Tensor, out: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    message = message_of(table, "dequantize", format, block, row)
    numbers = (message.layout.format.number, cpu.DTYPES[out.dtype])
    source = (payloads, *message.places, payloads.stride(0), payloads.shape[0])
    cpu.call("dequantize", *numbers, *source, table, row, block, *rest, out)


@dequantize_op.kernel("cuda")
def _dequantize_cuda(
    payloads: Tensor, out: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    layout, rows, *_, places = message_of(table, "dequantize", format, block, row)
    # Decoding needs no maximum, so the block is an argument and one kernel serves all blocks.
    name = f"dequantize<{layout.format.cpp}, {cuda.DTYPES[out.dtype]}>"
    source = (aligned(payloads), *places, payloads.stride(0), payloads.shape[0])
    arguments = (*source, on_device(table, out.device), row, block, *rest, out)
    warps = (layout.n + layout.tails) // 256 + 1
    cuda.launch("blockwise.cu", name, out.device, warps, arguments, rows)
