"""Rotates blocks by the Hadamard transform and quantises them in one pass.

A rotation spreads every entry over its block, so that none stands out: at 4 bits and fewer the
error is then that of a normal distribution for any gradient. Rotations are linear, so the sum of
payloads with the same rotation is the rotated sum, and ``requantize`` need not rotate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _blockwise_definition as definition
from . import philox
from ._blockwise_checks import check_feedback, check_message, check_messages, rows_in
from ._blockwise_formats import FORMATS, Payload, layout_of
from .blockwise import aligned, as_messages, parts, source_of
from .hadamard import check_signs, hadamard_op
from .runtime import cpu, cuda
from .runtime.op import check, op

__all__ = ["dequantize_rotated", "quantize_rotated"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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
    shard: int | None = None,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Writes the payload of the rotated blocks of ``x``, or of ``x + residual``.

    Equals ``hadamard`` followed by ``quantize`` bit for bit, in one pass. What the payload leaves
    out is rotated back into ``unsent``. Zeros fill up the last block before it is rotated, and it
    is sent whole, since a rotation spreads entries over all of it.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        payload, residual, unsent, random: as for ``quantize``.
        format: "int8", "int4", "int2" or "sign".
        block: entries per scale and per rotation, a power of two up to 1024.
        rotation: bits for the signs, the same key on all ranks; ``first`` is a multiple of 4096.
            Row r of a message takes ``rotation.row(r)``.
        shard: entries per row, a multiple of ``block``. By default ``x.numel()``, rounded up.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Wang et al., SDP4Bit, 2024; Vargaftik et al., DRIVE, 2021.
    """
    key = philox.key_of("quantize_rotated", random)
    turn = philox.key_of("quantize_rotated", rotation, "rotation")
    shard = whole_blocks(x.numel(), block) if shard is None else shard
    quantize_rotated_op(x, payload, format, block, shard, *turn, residual, unsent, *key)


def whole_blocks(n: int, block: int) -> int:
    """Returns ``n`` rounded up to a multiple of ``block``."""
    return -(-n // block) * block


def dequantize_rotated(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    rotation: philox.RandomBits,
    *,
    shard: int | None = None,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes the sum of the decoded payloads, rotated back; otherwise as ``dequantize``."""
    turn = philox.key_of("dequantize_rotated", rotation, "rotation")
    shard = whole_blocks(out.numel(), block) if shard is None else shard
    dequantize_rotated_op(payloads, out, format, block, shard, factor, accumulate, *turn)


@op(
    "quantize_rotated(Tensor x, Tensor(a!) payload, str format, int block, int shard, Tensor turn,"
    " int turn_seed, int turn_stream, int turn_first, Tensor? residual, Tensor(b!)? unsent,"
    " Tensor? step, int seed, int stream, int first) -> ()",
    same=[("residual", "unsent")],
)
def quantize_rotated_op(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    shard: int,
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
    layout = Payload(FORMATS[format], block, shard)
    c = x.to(torch.float32).flatten()
    if residual is not None:
        c = c + residual.flatten()
    for row, begin, end in definition.rows_of(x.numel(), shard, rows_in(payload)):
        offset = row * philox.ROW
        signs = (turn, turn_seed, turn_stream, turn_first + offset)
        rotated = pad(c[begin:end], (0, (begin - end) % block))
        hadamard_op.definition(rotated, rotated, block, False, *signs, rotated.numel())
        noise, key = None, (seed, stream, first + offset)
        if step is not None:
            noise = philox.half_words(rotated.numel(), int(step), *key, device=x.device)
        into = payload.view(-1)[row * layout.bytes : (row + 1) * layout.bytes]
        left_out = definition.encode(rotated, into, layout, noise)
        if unsent is not None:
            # Feedback adds it to the next gradient, before the next rotation, whose signs differ.
            hadamard_op.definition(left_out, left_out, block, True, *signs, left_out.numel())
            unsent.view(-1)[begin:end] = left_out[: end - begin]


@op(
    "dequantize_rotated(Tensor payloads, Tensor(a!) out, str format, int block, int shard,"
    " float factor, bool accumulate, Tensor turn, int turn_seed, int turn_stream, int turn_first)"
    " -> ()"
)
def dequantize_rotated_op(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    shard: int,
    factor: float,
    accumulate: bool,
    turn: Tensor,
    turn_seed: int,
    turn_stream: int,
    turn_first: int,
) -> None:
    layout, rows = Payload(FORMATS[format], block, shard), as_messages(payloads)
    for row, begin, end in definition.rows_of(out.numel(), shard, rows.shape[1]):
        # The sum is rotated back once, not each payload: fewer transforms, and fewer roundings.
        total = definition.sum_payloads(rows[:, row], layout, whole_blocks(end - begin, block))
        signs = (turn, turn_seed, turn_stream, turn_first + row * philox.ROW)
        hadamard_op.definition(total, total, block, True, *signs, total.numel())
        total = total[: end - begin] * factor  # after the rotation, as in the kernels
        here = out.view(-1)[begin:end]
        here.copy_(here.to(torch.float32) + total if accumulate else total)


# Checks of arguments -------------------------------------------------------------------------


@quantize_rotated_op.check
def _check_quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    shard: int,
    turn: Tensor,
    turn_seed: int,
    turn_stream: int,
    turn_first: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    *key: int,
) -> None:
    n = x.numel()
    check("quantize_rotated", "x", x, like=x, dtypes=_DTYPES)
    _check_blocks("quantize_rotated", format, block, shard)
    check_signs("quantize_rotated", "rotation", x, turn, turn_seed, turn_stream, turn_first)
    check_message("quantize_rotated", payload, format, block, shard, n, x)
    check_feedback("quantize_rotated", x, n, residual, unsent)
    philox.check_key(x, step, *key)


@dequantize_rotated_op.check
def _check_dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    shard: int,
    factor: float,
    accumulate: bool,
    turn: Tensor,
    *key: int,
) -> None:
    check("dequantize_rotated", "out", out, like=payloads, dtypes=_DTYPES)
    _check_blocks("dequantize_rotated", format, block, shard)
    check_signs("dequantize_rotated", "rotation", out, turn, *key)
    check_messages("dequantize_rotated", payloads, format, block, shard, out.numel())


def _check_blocks(caller: str, format: str, block: int, shard: int) -> None:
    layout_of(caller, format, block, shard)
    if format not in _FORMATS:
        raise ValueError(f"{caller}(format): one of {', '.join(_FORMATS)}, got {format!r}")
    if block > _LONGEST:
        raise ValueError(f"{caller}(block): {_LONGEST} at most, got {block}")
    if shard % block:
        raise ValueError(f"{caller}(shard): a multiple of the block, {block}, got {shard}")


# Kernels --------------------------------------------------------------------------------------


@quantize_rotated_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor, payload: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout = layout_of("quantize_rotated", format, block, shard)
    numbers = (layout.format.number, cpu.DTYPES[x.dtype], block)
    # 1 / sqrt(block) is irrational for odd powers of two. It is an argument, so that every kernel
    # uses the same float32.
    source = (x, x.numel(), shard, rows_in(payload), block**-0.5)
    cpu.call("quantize_rotated", *numbers, *source, *rest, *parts(payload, layout))


@quantize_rotated_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor, payload: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout, rows = layout_of("quantize_rotated", format, block, shard), rows_in(payload)
    name = f"quantize_rotated<{layout.format.cpp}, {cuda.DTYPES[x.dtype]}, {block}>"
    source = (x, x.numel(), shard, block**-0.5)
    arguments = (*source, *rest, *parts(aligned(payload), layout))
    cuda.launch("rotated.cu", name, x.device, shard // max(block, 256) + 1, arguments, rows)


@dequantize_rotated_op.kernel("cpu")
def _dequantize_cpu(
    payloads: Tensor, out: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout = layout_of("dequantize_rotated", format, block, shard)
    numbers = (layout.format.number, cpu.DTYPES[out.dtype], block)
    source = (*source_of(payloads, layout, out.numel()), rows_in(payloads[0]))
    cpu.call("dequantize_rotated", *numbers, *source, *_settings(layout, *rest), out)


@dequantize_rotated_op.kernel("cuda")
def _dequantize_cuda(
    payloads: Tensor, out: Tensor, format: str, block: int, shard: int, *rest: Any
) -> None:
    layout = layout_of("dequantize_rotated", format, block, shard)
    name = f"dequantize_rotated<{layout.format.cpp}, {cuda.DTYPES[out.dtype]}, {block}>"
    source = source_of(aligned(payloads), layout, out.numel())
    arguments, rows = (*source, *_settings(layout, *rest), out), rows_in(payloads[0])
    cuda.launch("rotated.cu", name, out.device, shard // max(block, 256) + 1, arguments, rows)


def _settings(layout: Payload, factor: float, accumulate: bool, *signs: Any) -> tuple[Any, ...]:
    """Returns the arguments that both kernels share."""
    return (factor, accumulate, layout.block**-0.5, *signs)
