"""Rotates blocks by the Hadamard transform and quantises them in one pass.

A rotation spreads every entry over its block, so that none stands out: at 4 bits and fewer the
error is then that of a normal distribution for any gradient. Rotations are linear, so the sum of
payloads with the same rotation is the rotated sum, and ``requantize`` need not rotate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _blockwise_definition as definition
from . import philox
from ._blockwise import check_message, check_messages, layout_for, message_of
from ._tables import on_device
from .blockwise import aligned, as_messages, table_for
from .hadamard import check_signs, transform
from .runtime import cpu, cuda
from .runtime.op import FEEDBACK, FLOATS, Entries, op
from .segments import Segments, rows_of, segments_of

__all__ = ["dequantize_rotated", "quantize_rotated"]

_LONGEST = 1024  # entries; a warp keeps a block in registers and rotates it twice
# Rotation helps formats of few, even steps. The steps of 8-bit floats shrink with the magnitude of
# an entry, so that an outlier costs the other entries little.
_FORMATS = ("int8", "int4", "int2", "sign")


def quantize_rotated(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    rotation: philox.RandomBits,
    *,
    segments: Segments | None = None,
    row: int = -1,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Writes the payload of the rotated blocks of ``x``, or of ``x + residual``.

    Equals ``hadamard`` followed by ``quantize`` bit for bit, in one pass. What the payload leaves
    out is rotated back into ``unsent``. Zeros fill up a segment's last block before it is rotated,
    and it is sent whole, since a rotation spreads entries over all of it.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        payload, row, residual, unsent, random: as for ``quantize``.
        format: "int8", "int4", "int2" or "sign".
        block: entries per scale and per rotation, a power of two up to 1024.
        rotation: bits for the signs, the same key on all ranks; ``first`` is a multiple of 4096.
            Row r of a message takes ``rotation.row(r)``.
        segments: of ``segments_for(format, block, ..., whole=True)``. None: ``x`` is one segment.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Wang et al., SDP4Bit, 2024; Vargaftik et al., DRIVE, 2021.
    """
    key = philox.key_of("quantize_rotated", random)
    turn = philox.key_of("quantize_rotated", rotation, "rotation")
    table = table_for("quantize_rotated", segments, format, block, x, whole=True)
    quantize_rotated_op(x, payload, format, block, table, row, *turn, residual, unsent, *key)


def dequantize_rotated(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    rotation: philox.RandomBits,
    *,
    segments: Segments | None = None,
    row: int = -1,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes the sum of the decoded payloads, rotated back; otherwise as ``dequantize``."""
    turn = philox.key_of("dequantize_rotated", rotation, "rotation")
    table = table_for("dequantize_rotated", segments, format, block, out, whole=True)
    dequantize_rotated_op(payloads, out, format, block, table, row, factor, accumulate, *turn)


@op(
    "quantize_rotated(Tensor x, Tensor(a!) payload, str format, int block, Tensor table, int row,"
    " Tensor turn, int turn_seed, int turn_stream, int turn_first, Tensor? residual,"
    " Tensor(b!)? unsent, Tensor? step, int seed, int stream, int first) -> ()",
    same=[("residual", "unsent"), ("turn", "step")],
    takes={
        "table": segments_of,
        "x": Entries(FLOATS),
        "payload": Entries(torch.uint8),
        **FEEDBACK,
    },
)
def quantize_rotated_op(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    turn: Tensor,
    turn_seed: int,
    turn_stream: int,
    turn_first: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    segments, layout = segments_of(table, ""), layout_for(table, "", format, block)
    c = x.to(torch.float32).flatten()
    if residual is not None:
        c = c + residual.flatten()
    for place, (index, begin, end) in enumerate(rows_of(segments, row)):
        offset = place * philox.ROW
        signs = (turn, turn_seed, turn_stream, turn_first + offset)
        slots, entries = segments.coded(index, x.device)
        rotated = c.new_zeros(layout.n)
        rotated[slots] = c[begin:end][entries]
        transform(rotated, rotated, block, False, *signs)
        noise, key = None, (seed, stream, first + offset)
        if step is not None:
            noise = philox.half_words(layout.n, int(step), *key, device=x.device)
        into = payload.view(-1)[place * layout.bytes : (place + 1) * layout.bytes]
        left_out = definition.encode(rotated, into, layout, noise)
        if unsent is not None:
            # Feedback adds it to the next gradient, before the next rotation, whose signs differ.
            transform(left_out, left_out, block, True, *signs)
            unsent.view(-1)[begin:end] = torch.empty_like(c[begin:end]).index_copy(
                0, entries, left_out[slots]
            )


@op(
    "dequantize_rotated(Tensor payloads, Tensor(a!) out, str format, int block, Tensor table,"
    " int row, float factor, bool accumulate, Tensor turn, int turn_seed, int turn_stream,"
    " int turn_first) -> ()",
    takes={"table": segments_of, "out": Entries(FLOATS), "payloads": Entries(torch.uint8)},
)
def dequantize_rotated_op(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    factor: float,
    accumulate: bool,
    turn: Tensor,
    turn_seed: int,
    turn_stream: int,
    turn_first: int,
) -> None:
    segments, layout = segments_of(table, ""), layout_for(table, "", format, block)
    rows = as_messages(payloads)
    for place, (index, begin, end) in enumerate(rows_of(segments, row)):
        # The sum is rotated back once, not each payload: fewer transforms, and fewer roundings.
        total = definition.sum_payloads(rows[:, place], layout, layout.n)
        transform(
            total, total, block, True, turn, turn_seed, turn_stream, turn_first + place * philox.ROW
        )
        slots, entries = segments.coded(index, out.device)
        here = out.view(-1)[begin:end]
        sums = torch.empty(end - begin, dtype=torch.float32, device=out.device)
        sums[entries] = total[slots] * factor  # after the rotation, as in the kernels
        here.copy_(here.to(torch.float32) + sums if accumulate else sums)


# Checks of arguments -------------------------------------------------------------------------


@quantize_rotated_op.check
def _check_quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    turn: Tensor,
    turn_seed: int,
    turn_stream: int,
    turn_first: int,
    step: Tensor | None,
    *key: int,
) -> None:
    _check_blocks("quantize_rotated", format, block, table)
    check_signs("quantize_rotated", "rotation", x, turn, turn_seed, turn_stream, turn_first)
    check_message("quantize_rotated", payload, format, block, table, row, x.numel())
    philox.check_key(x, step, *key)


@dequantize_rotated_op.check
def _check_dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    turn: Tensor,
    *key: int,
) -> None:
    _check_blocks("dequantize_rotated", format, block, table)
    check_signs("dequantize_rotated", "rotation", out, turn, *key)
    check_messages("dequantize_rotated", payloads, format, block, table, row, out.numel())


def _check_blocks(caller: str, format: str, block: int, table: Tensor) -> None:
    layout_for(table, caller, format, block)
    if format not in _FORMATS:
        raise ValueError(f"{caller}(format): one of {', '.join(_FORMATS)}, got {format!r}")
    if block > _LONGEST:
        raise ValueError(f"{caller}(block): {_LONGEST} at most, got {block}")
    if segments_of(table, caller).most:
        raise ValueError(f"{caller}(segments): of segments_for(..., whole=True)")


# Kernels --------------------------------------------------------------------------------------


@quantize_rotated_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor, payload: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    layout, *_, places = message_of(table, "quantize_rotated", format, block, row)
    numbers = (layout.format.number, cpu.DTYPES[x.dtype], block)
    # 1 / sqrt(block) is irrational for odd powers of two. It is an argument, so that every kernel
    # uses the same float32.
    source = (x, table, row, block**-0.5)
    cpu.call("quantize_rotated", *numbers, *source, *rest, payload, *places)


@quantize_rotated_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor, payload: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    layout, rows, *_, places = message_of(table, "quantize_rotated", format, block, row)
    name = f"quantize_rotated<{layout.format.cpp}, {cuda.DTYPES[x.dtype]}, {block}>"
    source = (x, on_device(table, x.device), row, block**-0.5)
    arguments = (*source, *rest, aligned(payload), *places)
    warps = layout.n // max(block, 256) + 1
    cuda.launch("rotated.cu", name, x.device, warps, arguments, rows)


@dequantize_rotated_op.kernel("cpu")
def _dequantize_cpu(
    payloads: Tensor, out: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    layout, *_, places = message_of(table, "dequantize_rotated", format, block, row)
    numbers = (layout.format.number, cpu.DTYPES[out.dtype], block)
    source = (payloads, *places, payloads.stride(0), payloads.shape[0], table, row)
    cpu.call("dequantize_rotated", *numbers, *source, *_settings(block, *rest), out)


@dequantize_rotated_op.kernel("cuda")
def _dequantize_cuda(
    payloads: Tensor, out: Tensor, format: str, block: int, table: Tensor, row: int, *rest: Any
) -> None:
    layout, rows, *_, places = message_of(table, "dequantize_rotated", format, block, row)
    name = f"dequantize_rotated<{layout.format.cpp}, {cuda.DTYPES[out.dtype]}, {block}>"
    source = (aligned(payloads), *places, payloads.stride(0), payloads.shape[0])
    arguments = (*source, on_device(table, out.device), row, *_settings(block, *rest), out)
    warps = layout.n // max(block, 256) + 1
    cuda.launch("rotated.cu", name, out.device, warps, arguments, rows)


def _settings(block: int, factor: float, accumulate: bool, *signs: Any) -> tuple[Any, ...]:
    """Returns the arguments that both kernels share."""
    return (factor, accumulate, block**-0.5, *signs)
