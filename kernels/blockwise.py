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
from ._blockwise_formats import ALIGNMENT, FORMATS, Payload, layout_of, payload_bytes
from .runtime import cpu, cuda
from .runtime.arguments import check_whole
from .runtime.op import check, op

__all__ = ["FORMATS", "dequantize", "payload_bytes", "quantize", "requantize"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    *,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Writes the payload of ``x``, or of ``x + residual``, and what the payload leaves out.

    Args:
        x: float32, float16 or bfloat16, contiguous; worked on as float32.
        payload: uint8, ``payload_bytes(x.numel(), format, block)`` entries.
        format: a key of ``FORMATS``.
        block: entries per scale.
        residual: float32, as many entries as ``x``; added before quantising.
        unsent: float32, as many entries as ``x``; receives what was not sent. May be ``residual``.
        random: bits for stochastic rounding, which is unbiased except for "sign" and for formats
            whose scale is a power of two ("mx_..."). None rounds to nearest.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Example:
        >>> payload = torch.empty(payload_bytes(grad.numel(), "int8", 256), dtype=torch.uint8)
        >>> quantize(grad, payload, "int8", 256)
        >>> dequantize(payload[None], grad, "int8", 256)
    """
    quantize_op(x, payload, format, block, residual, unsent, *philox.key_of("quantize", random))


def dequantize(
    payloads: Tensor,
    out: Tensor,
    format: str,
    block: int,
    *,
    factor: float = 1.0,
    accumulate: bool = False,
) -> None:
    """Writes the sum of the decoded payloads, times ``factor``, to ``out``.

    Args:
        payloads: uint8, shape (n, bytes) with n >= 1; summed in their order, in float32.
        out: float32, float16 or bfloat16, contiguous.
        accumulate: adds to ``out`` instead. With ``factor=-1`` and one payload, ``out`` becomes
            what the payload leaves out of it.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    dequantize_op(payloads, out, format, block, factor, accumulate)


def requantize(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    *,
    factor: float = 1.0,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Quantises the sum of the decoded payloads, as in the middle of a two-phase exchange.

    The sum does not pass through memory. Arguments are those of ``dequantize`` and ``quantize``;
    ``n`` is the number of entries.
    """
    key = philox.key_of("requantize", random)
    requantize_op(payloads, payload, n, format, block, factor, residual, unsent, *key)


# Quantise -------------------------------------------------------------------------------------


@op(
    "quantize(Tensor x, Tensor(a!) payload, str format, int block, Tensor? residual,"
    " Tensor(b!)? unsent, Tensor? step, int seed, int stream, int first) -> ()",
    same=[("residual", "unsent")],
)
def quantize_op(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    *key: int,
) -> None:
    layout = Payload(FORMATS[format], block, x.numel())
    c = x.to(torch.float32)  # scales of 16-bit gradients are float32 as well
    if residual is not None:
        c = c + residual
    noise = None
    if step is not None:
        noise = philox.half_words(x.numel(), int(step), *key, device=x.device)
    left_out = definition.encode(c, payload, layout, noise)
    if unsent is not None:
        unsent.copy_(left_out)


# Dequantise -----------------------------------------------------------------------------------


@op(
    "dequantize(Tensor payloads, Tensor(a!) out, str format, int block, float factor,"
    " bool accumulate) -> ()"
)
def dequantize_op(
    payloads: Tensor, out: Tensor, format: str, block: int, factor: float, accumulate: bool
) -> None:
    total = definition.sum_payloads(payloads, Payload(FORMATS[format], block, out.numel())) * factor
    out.copy_(out.to(torch.float32) + total if accumulate else total)


# Dequantise, sum and quantise again -----------------------------------------------------------


@op(
    "requantize(Tensor payloads, Tensor(a!) payload, int n, str format, int block, float factor,"
    " Tensor? residual, Tensor(b!)? unsent, Tensor? step, int seed, int stream, int first) -> ()",
    same=[("residual", "unsent")],
)
def requantize_op(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    factor: float,
    *rest: Any,
) -> None:
    # The definition rather than the op, since a definition runs no kernel in any mode.
    total = definition.sum_payloads(payloads, Payload(FORMATS[format], block, n)) * factor
    quantize_op.definition(total, payload, format, block, *rest)


# Checks of arguments -------------------------------------------------------------------------


@quantize_op.check
def _check_quantize(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    *key: int,
) -> None:
    layout = layout_of("quantize", format, block, x.numel())
    check("quantize", "x", x, like=x, dtypes=_DTYPES)
    check_payload("quantize", payload, layout, x)
    check_feedback("quantize", x, layout.n, residual, unsent)
    philox.check_key(x, step, *key)


@dequantize_op.check
def _check_dequantize(
    payloads: Tensor, out: Tensor, format: str, block: int, factor: float, accumulate: bool
) -> None:
    layout = layout_of("dequantize", format, block, out.numel())
    check("dequantize", "out", out, like=payloads, dtypes=_DTYPES)
    check_payloads("dequantize", payloads, layout)


@requantize_op.check
def _check_requantize(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    factor: float,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor | None,
    *key: int,
) -> None:
    check_whole("requantize", "n", n, 0, 2**56)
    layout = layout_of("requantize", format, block, n)
    check_payloads("requantize", payloads, layout)
    check_payload("requantize", payload, layout, payloads)
    check_feedback("requantize", payloads, n, residual, unsent)
    philox.check_key(payloads, step, *key)


def check_payload(caller: str, payload: Tensor, layout: Payload, like: Tensor) -> None:
    """Raises unless ``payload`` has the dtype and the size of the layout."""
    check(caller, "payload", payload, like=like, dtypes=(torch.uint8,))
    if payload.numel() != layout.bytes:
        _refuse_size(caller, "payload", layout, payload.numel())


def check_payloads(caller: str, payloads: Tensor, layout: Payload) -> None:
    """Raises unless ``payloads`` is a matrix whose rows have the size of the layout."""
    check(caller, "payloads", payloads, like=payloads, dtypes=(torch.uint8,))
    if payloads.dim() != 2 or not len(payloads):
        raise ValueError(
            f"{caller}(payloads): shape (1 or more, bytes), got {tuple(payloads.shape)}"
        )
    if payloads.shape[1] != layout.bytes:
        _refuse_size(caller, "payloads", layout, payloads.shape[1])


def _refuse_size(caller: str, name: str, layout: Payload, got: int) -> None:
    raise ValueError(
        f"{caller}({name}): {layout.bytes} bytes for {layout.n} entries, got {got}; "
        "see payload_bytes"
    )


def check_feedback(
    caller: str, like: Tensor, n: int, residual: Tensor | None, unsent: Tensor | None
) -> None:
    """Raises unless ``residual`` and ``unsent``, where given, are float32 of ``n`` entries."""
    if residual is not None:
        check(caller, "residual", residual, like=like, dtypes=(torch.float32,), n=n)
    if unsent is not None and unsent is not residual:  # feedback in place is the common case
        check(caller, "unsent", unsent, like=like, dtypes=(torch.float32,), n=n)


# Kernels --------------------------------------------------------------------------------------


@quantize_op.kernel("cpu")
def _quantize_cpu(x: Tensor, payload: Tensor, format: str, block: int, *rest: Any) -> None:
    numbers = (FORMATS[format].number, cpu.DTYPES[x.dtype], block)
    layout = Payload(FORMATS[format], block, x.numel())
    cpu.call("quantize", *numbers, x, layout.n, *rest, *parts(payload, layout))


@quantize_op.kernel("cuda")
def _quantize_cuda(x: Tensor, payload: Tensor, format: str, block: int, *rest: Any) -> None:
    layout = Payload(FORMATS[format], block, x.numel())
    # The block is a template argument, so that a lane's entries stay in registers: an array is kept
    # there only where every index is known to the compiler.
    name = f"quantize<{layout.format.cpp}, {cuda.DTYPES[x.dtype]}, {block}>"
    arguments = (x, layout.n, *rest, *parts(aligned(payload), layout))
    # A warp takes whole blocks, and 256 entries at least: they share calls of Philox.
    cuda.launch("blockwise.cu", name, x.device, layout.n // max(block, 256) + 1, arguments)


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
    payloads: Tensor, out: Tensor, format: str, block: int, factor: float, accumulate: bool
) -> None:
    layout = Payload(FORMATS[format], block, out.numel())
    cpu.call(
        "dequantize",
        *(layout.format.number, cpu.DTYPES[out.dtype]),
        *_decoded(payloads, layout, factor, accumulate, out),
    )


@dequantize_op.kernel("cuda")
def _dequantize_cuda(
    payloads: Tensor, out: Tensor, format: str, block: int, factor: float, accumulate: bool
) -> None:
    layout = Payload(FORMATS[format], block, out.numel())
    # Decoding needs no maximum, so the block is an argument and one kernel serves all blocks.
    name = f"dequantize<{layout.format.cpp}, {cuda.DTYPES[out.dtype]}>"
    arguments = _decoded(aligned(payloads), layout, factor, accumulate, out)
    cuda.launch("blockwise.cu", name, out.device, layout.n // 256 + 1, arguments)


def _decoded(
    payloads: Tensor, layout: Payload, factor: float, accumulate: bool, out: Tensor
) -> tuple[Any, ...]:
    """Returns the arguments that both kernels share."""
    source = (payloads, layout.codes_at, payloads.stride(0), len(payloads))
    return (*source, layout.n, layout.block, factor, accumulate, out)


@requantize_op.kernel("cpu")
def _requantize_cpu(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    factor: float,
    *rest: Any,
) -> None:
    layout = Payload(FORMATS[format], block, n)
    source = (payloads, payloads.stride(0), len(payloads), factor, n)
    cpu.call("requantize", layout.format.number, block, *source, *rest, *parts(payload, layout))


@requantize_op.kernel("cuda")
def _requantize_cuda(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    factor: float,
    *rest: Any,
) -> None:
    layout = Payload(FORMATS[format], block, n)
    name = f"requantize<{layout.format.cpp}, {block}>"
    source = (aligned(payloads), payloads.stride(0), len(payloads), factor, n)
    arguments = (*source, *rest, *parts(aligned(payload), layout))
    cuda.launch("blockwise.cu", name, payloads.device, n // max(block, 256) + 1, arguments)
