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
from ._blockwise_formats import FORMATS, Payload, layout_of
from .blockwise import aligned, check_feedback, check_payload, check_payloads, parts
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
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Writes the payload of the rotated blocks of ``x``, or of ``x + residual``.

    Equals ``hadamard`` followed by ``quantize`` bit for bit, in one pass. What the payload leaves
    out is rotated back into ``unsent``.

    Args:
        x: float32, float16 or bfloat16, contiguous, a multiple of ``block`` entries.
        payload, residual, unsent, random: as for ``quantize``.
        format: "int8", "int4", "int2" or "sign".
        block: entries per scale and per rotation, a power of two up to 1024.
        rotation: bits for the signs, the same key on all ranks; ``first`` is a multiple of 4096.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Wang et al., SDP4Bit, 2024; Vargaftik et al., DRIVE, 2021.
    """
    key = philox.key_of("quantize_rotated", random)
    turn = philox.key_of("quantize_rotated", rotation, "rotation")
    quantize_rotated_op(x, payload, format, block, *turn, residual, unsent, *key)


def dequantize_rotated(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    rotation: philox.RandomBits,
    *,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes the sum of the decoded payloads, rotated back; otherwise as ``dequantize``."""
    turn = philox.key_of("dequantize_rotated", rotation, "rotation")
    dequantize_rotated_op(payloads, out, format, block, factor, accumulate, *turn)


@op(
    "quantize_rotated(Tensor x, Tensor(a!) payload, str format, int block, Tensor turn,"
    " int turn_seed, int turn_stream, int turn_first, Tensor? residual, Tensor(b!)? unsent,"
    " Tensor? step, int seed, int stream, int first) -> ()",
    same=[("residual", "unsent")],
)
def quantize_rotated_op(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    turn: Tensor,
    turn_seed: int,
    turn_stream: int,
    turn_first: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    *key: int,
) -> None:
    signs = (turn, turn_seed, turn_stream, turn_first)
    c = x.to(torch.float32).flatten()
    if residual is not None:
        c = c + residual.flatten()
    rotated = torch.empty_like(c)
    hadamard_op.definition(c, rotated, block, False, *signs)
    noise = None
    if step is not None:
        noise = philox.half_words(x.numel(), int(step), *key, device=x.device)
    layout = Payload(FORMATS[format], block, x.numel())
    left_out = definition.encode(rotated, payload, layout, noise)
    if unsent is not None:
        # Feedback adds it to the next gradient, before the next rotation, which has other signs.
        hadamard_op.definition(left_out, unsent, block, True, *signs)


@op(
    "dequantize_rotated(Tensor payloads, Tensor(a!) out, str format, int block, float factor,"
    " bool accumulate, Tensor turn, int turn_seed, int turn_stream, int turn_first) -> ()"
)
def dequantize_rotated_op(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    factor: float,
    accumulate: bool,
    *signs: Any,
) -> None:
    # The sum is rotated back once, not each payload: fewer transforms, and fewer roundings.
    rotated = definition.sum_payloads(payloads, Payload(FORMATS[format], block, out.numel()))
    total = torch.empty_like(rotated)
    hadamard_op.definition(rotated, total, block, True, *signs)
    total *= factor  # after the rotation, as in the kernels
    out.view(-1).copy_(out.view(-1).to(torch.float32) + total if accumulate else total)


# Checks of arguments -------------------------------------------------------------------------


@quantize_rotated_op.check
def _check_quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    turn: Tensor,
    turn_seed: int,
    turn_stream: int,
    turn_first: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    *key: int,
) -> None:
    layout = layout_of("quantize_rotated", format, block, x.numel())
    check("quantize_rotated", "x", x, like=x, dtypes=_DTYPES)
    _check_blocks("quantize_rotated", layout.n, format, block)
    check_signs("quantize_rotated", "rotation", x, turn, turn_seed, turn_stream, turn_first)
    check_payload("quantize_rotated", payload, layout, x)
    check_feedback("quantize_rotated", x, layout.n, residual, unsent)
    philox.check_key(x, step, *key)


@dequantize_rotated_op.check
def _check_dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    factor: float,
    accumulate: bool,
    turn: Tensor,
    *key: int,
) -> None:
    layout = layout_of("dequantize_rotated", format, block, out.numel())
    check("dequantize_rotated", "out", out, like=payloads, dtypes=_DTYPES)
    _check_blocks("dequantize_rotated", layout.n, format, block)
    check_signs("dequantize_rotated", "rotation", out, turn, *key)
    check_payloads("dequantize_rotated", payloads, layout)


def _check_blocks(caller: str, n: int, format: str, block: int) -> None:
    if format not in _FORMATS:
        raise ValueError(f"{caller}(format): one of {', '.join(_FORMATS)}, got {format!r}")
    if block > _LONGEST:
        raise ValueError(f"{caller}(block): {_LONGEST} at most, got {block}")
    # A rotation spreads entries over the padding as well, which would then have to be sent.
    if n % block:
        raise ValueError(f"{caller}: a multiple of {block} entries, got {n}; pad with zeros")


# Kernels --------------------------------------------------------------------------------------


@quantize_rotated_op.kernel("cpu")
def _quantize_cpu(x: Tensor, payload: Tensor, format: str, block: int, *rest: Any) -> None:
    layout = Payload(FORMATS[format], block, x.numel())
    numbers = (layout.format.number, cpu.DTYPES[x.dtype], block)
    # 1 / sqrt(block) is irrational for odd powers of two. It is an argument, so that every kernel
    # uses the same float32.
    arguments = (x, layout.n, block**-0.5, *rest, *parts(payload, layout))
    cpu.call("quantize_rotated", *numbers, *arguments)


@quantize_rotated_op.kernel("cuda")
def _quantize_cuda(x: Tensor, payload: Tensor, format: str, block: int, *rest: Any) -> None:
    layout = Payload(FORMATS[format], block, x.numel())
    name = f"quantize_rotated<{layout.format.cpp}, {cuda.DTYPES[x.dtype]}, {block}>"
    arguments = (x, layout.n, block**-0.5, *rest, *parts(aligned(payload), layout))
    cuda.launch("rotated.cu", name, x.device, layout.n // max(block, 256) + 1, arguments)


@dequantize_rotated_op.kernel("cpu")
def _dequantize_cpu(payloads: Tensor, out: Tensor, format: str, block: int, *rest: Any) -> None:
    layout = Payload(FORMATS[format], block, out.numel())
    numbers = (layout.format.number, cpu.DTYPES[out.dtype], block)
    cpu.call("dequantize_rotated", *numbers, *_source(payloads, layout, *rest), out)


@dequantize_rotated_op.kernel("cuda")
def _dequantize_cuda(payloads: Tensor, out: Tensor, format: str, block: int, *rest: Any) -> None:
    layout = Payload(FORMATS[format], block, out.numel())
    name = f"dequantize_rotated<{layout.format.cpp}, {cuda.DTYPES[out.dtype]}, {block}>"
    arguments = (*_source(aligned(payloads), layout, *rest), out)
    cuda.launch("rotated.cu", name, out.device, layout.n // max(block, 256) + 1, arguments)


def _source(
    payloads: Tensor, layout: Payload, factor: float, accumulate: bool, *signs: Any
) -> tuple[Any, ...]:
    """Returns the arguments that both kernels share."""
    numbers = (factor, accumulate, layout.block**-0.5)
    return (
        payloads,
        layout.codes_at,
        payloads.stride(0),
        len(payloads),
        layout.n,
        *numbers,
        *signs,
    )
