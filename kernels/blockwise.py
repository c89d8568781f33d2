"""Blockwise formats: one scale per block, one code of 1 to 8 bits per entry.

A payload is one uint8 tensor: scales, then codes, filled up with zeros to a multiple of 16 bytes.
``docs/design/kernels.md`` has the table of formats. Kernels equal the definitions bit for bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _cpu, _cuda, philox
from ._op import op

__all__ = ["FORMATS", "Payload", "dequantize", "payload_bytes", "quantize", "requantize"]

_ALIGNMENT = 16
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Format:
    """Bits of a code, bytes of a scale; how kernels call it."""

    number: int
    cpp: str  # its name in C++
    bits: int
    scale_bytes: int = 4
    tiny: float = 2.0**-120  # blocks whose largest magnitude is below it decode to zero
    float8: torch.dtype | None = None

    @property
    def top(self) -> float:
        """The largest value of a code."""
        return torch.finfo(self.float8).max if self.float8 else 2.0 ** (self.bits - 1) - 1

    @property
    def planes(self) -> int:
        """Codes that share a byte, 32 entries apart; signs are consecutive."""
        return 1 if self.bits == 1 else 8 // self.bits

    @property
    def unit(self) -> int:
        """Entries whose codes are stored together; a block has a multiple of it."""
        return 32 * self.planes


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {
    "int8": Format(0, "Int8", 8),
    "int4": Format(1, "Int4", 4),
    "int2": Format(2, "Int2", 2),
    "e4m3": Format(3, "E4M3Scaled", 8, tiny=2.0**-110, float8=_E4M3),  # 448 / 2^-120 would overflow
    "e5m2": Format(4, "E5M2Scaled", 8, tiny=2.0**-110, float8=_E5M2),
    "mx_e4m3": Format(5, "E4M3MX", 8, 1, float8=_E4M3),
    "mx_e5m2": Format(6, "E5M2MX", 8, 1, float8=_E5M2),
    "sign": Format(7, "Sign", 1),
}


@dataclass(frozen=True)
class Payload:
    """Where the parts of a payload of ``n`` entries lie: ``scales`` bytes, then codes."""

    format: Format
    block: int
    n: int

    @property
    def blocks(self) -> int:
        return -(-self.n // self.block)

    @property
    def codes_at(self) -> int:
        """Byte of the first code."""
        return -(-self.blocks * self.format.scale_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def code_bytes(self) -> int:
        return -(-self.n // self.format.unit) * self.format.unit * self.format.bits // 8

    @property
    def bytes(self) -> int:
        return -(-(self.codes_at + self.code_bytes) // _ALIGNMENT) * _ALIGNMENT


def _layout(caller: str, format: str, block: int, n: int) -> Payload:
    if format not in FORMATS:
        raise ValueError(f"{caller}(format): one of {', '.join(FORMATS)}, got {format!r}")
    found = FORMATS[format]
    if block not in _BLOCKS or block < found.unit:
        allowed = ", ".join(str(b) for b in _BLOCKS if b >= found.unit)
        raise ValueError(f"{caller}(block): {format} takes one of {allowed}, got {block!r}")
    return Payload(found, block, n)


def payload_bytes(n: int, format: str, block: int) -> int:
    """Bytes of the payload of ``n`` entries."""
    return _layout("payload_bytes", format, block, n).bytes


# quantise -------------------------------------------------------------------------------------


@op(
    "quantize(Tensor x, Tensor(a!) payload, str format, int block, Tensor? residual,"
    " Tensor(b!)? left, Tensor? step, int seed, int stream, int first) -> ()"
)
def quantize_op(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    residual: Tensor | None,
    left: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    layout = Payload(FORMATS[format], block, x.numel())
    c = x.to(torch.float32)
    if residual is not None:
        c = c + residual
    noise = None
    if step is not None:
        bits = philox.half_words(x.numel(), seed, int(step), stream, first)
        noise = bits.to(x.device)
    rest = _encode(c, payload, layout, noise)
    if left is not None:
        left.copy_(rest)


def _encode(c: Tensor, payload: Tensor, layout: Payload, noise: Tensor | None) -> Tensor:
    """Writes the payload of flat ``c``; what it leaves out."""
    form, n = layout.format, layout.n
    rows = pad(c, (0, -n % layout.block)).view(-1, layout.block)
    counts = torch.full((len(rows),), float(layout.block), device=c.device)
    if n % layout.block:
        counts[-1] = n % layout.block
    largest = rows.abs().amax(1)  # keeps NaN
    finite = largest.isfinite()
    dead = ~finite | (largest < form.tiny)
    safe = torch.where(dead, 1.0, largest)
    top = torch.full_like(safe, form.top)
    if form.bits == 1:
        scale = _mean_magnitude(rows, counts)
        inverse = torch.ones_like(scale)
    elif form.scale_bytes == 1:
        exponent = (safe.view(torch.int32) >> 23) - int(torch.frexp(top)[1].max() - 1)
        exponent = exponent.clamp(min=1)
        scale = (exponent << 23).view(torch.float32)
        inverse = ((254 - exponent) << 23).view(torch.float32)
    else:
        scale, inverse = safe / top, top / safe
    scale = torch.where(finite, torch.where(dead, 0.0, scale), torch.nan)
    y = torch.where(dead[:, None], 0.0, rows * inverse[:, None])
    if noise is not None:
        noise = pad(noise, (0, -n % layout.block)).view(rows.shape)
    codes = _codes(y, form, noise)
    values = _values(codes, form)

    payload.zero_()
    if form.scale_bytes == 1:
        stored = (scale.view(torch.int32) >> 23).masked_fill(~finite, 255).to(torch.uint8)
    else:
        stored = scale.view(torch.uint8)
    payload[: stored.numel()] = stored
    flat = codes.view(-1)[: -(-n // form.unit) * form.unit]
    packed = _pack(flat, form)
    payload[layout.codes_at : layout.codes_at + packed.numel()] = packed
    return (rows - values * scale[:, None]).view(-1)[:n]


def _mean_magnitude(rows: Tensor, counts: Tensor) -> Tensor:
    """Entry i goes to sum i % 32; then halves are added to halves."""
    block = rows.shape[1]
    shares = (rows.abs() * (1 / block)).view(len(rows), -1, 32)
    sums = torch.zeros_like(shares[:, 0])
    for part in shares.unbind(1):
        sums = sums + part
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0] * (torch.full_like(counts, block) / counts)


def _codes(y: Tensor, form: Format, noise: Tensor | None) -> Tensor:
    """Codes of scaled entries, as int32."""
    if form.bits == 1:
        return (y < 0).to(torch.int32)
    if form.float8 is None:
        if noise is not None:
            y = y.clamp(-form.top, form.top) + philox.centred(noise)
        return y.round().to(torch.int32) & (1 << form.bits) - 1
    if noise is None:
        codes = y.clamp(-form.top, form.top).to(form.float8).view(torch.uint8)
        return codes.to(torch.int32)
    return _float8_codes(y, form.float8, noise)


def _float8_codes(y: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """8-bit floats: random bits below the last place are added, and what is below it is cut off."""
    info = torch.finfo(dtype)
    mantissa = 3 if dtype == _E4M3 else 2
    dropped, bias = 23 - mantissa, 7 if dtype == _E4M3 else 15
    bits = y.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    below = (noise << (dropped - 16) | 1 << (dropped - 17)).to(torch.int32)
    normal = (magnitude + below >> dropped) - ((127 - bias) << mantissa)
    places = y.abs() * 2.0 ** (bias - 1 + mantissa)
    denormal = (places + philox.centred(noise)).round().clamp(max=255).to(torch.int32)
    top = torch.tensor(info.max, dtype=dtype).view(torch.uint8).item()
    codes = torch.where(y.abs() < info.smallest_normal, denormal, normal).clamp(max=int(top))
    return codes | bits >> 24 & 0x80


def _values(codes: Tensor, form: Format) -> Tensor:
    """What codes stand for, before the scale."""
    if form.bits == 1:
        return 1.0 - 2.0 * codes
    if form.float8 is not None:
        return codes.to(torch.uint8).view(form.float8).to(torch.float32)
    wide = 32 - form.bits
    return (codes << wide >> wide).to(torch.float32)


def _pack(codes: Tensor, form: Format) -> Tensor:
    """int32 codes as bytes."""
    per_byte = 8 // form.bits
    if form.bits == 1:  # consecutive entries
        parts = codes.view(-1, 8)
    else:  # entries 32 apart
        parts = codes.view(-1, per_byte, 32).transpose(1, 2).reshape(-1, per_byte)
    shifts = form.bits * torch.arange(per_byte, device=codes.device, dtype=torch.int32)
    return (parts << shifts).sum(1).to(torch.uint8)


def _unpack(packed: Tensor, form: Format) -> Tensor:
    per_byte = 8 // form.bits
    shifts = form.bits * torch.arange(per_byte, device=packed.device, dtype=torch.int32)
    parts = packed.to(torch.int32)[:, None] >> shifts & (1 << form.bits) - 1
    if form.bits == 1:
        return parts.view(-1)
    return parts.view(-1, 32, per_byte).transpose(1, 2).reshape(-1)


# dequantise -----------------------------------------------------------------------------------


@op(
    "dequantize(Tensor payloads, Tensor(a!) out, str format, int block, float factor,"
    " bool accumulate) -> ()"
)
def dequantize_op(
    payloads: Tensor, out: Tensor, format: str, block: int, factor: float, accumulate: bool
) -> None:
    total = _sum(payloads, Payload(FORMATS[format], block, out.numel())) * factor
    out.copy_(out.to(torch.float32) + total if accumulate else total)


def _sum(payloads: Tensor, layout: Payload) -> Tensor:
    """The sum of what the payloads decode to, added in order, as float32."""
    parts = [_decode(payload, layout) for payload in payloads]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _decode(payload: Tensor, layout: Payload) -> Tensor:
    form = layout.format
    stored = payload[: layout.blocks * form.scale_bytes]
    if form.scale_bytes == 1:
        scale = (stored.to(torch.int32) << 23).view(torch.float32)
        scale = scale.masked_fill(stored == 255, torch.nan)
    else:
        scale = stored.clone().view(torch.float32)
    packed = payload[layout.codes_at : layout.codes_at + layout.code_bytes]
    values = _values(_unpack(packed, form), form)[: layout.n]
    rows = pad(values, (0, -layout.n % layout.block)).view(-1, layout.block)
    return (rows * scale[:, None]).view(-1)[: layout.n]


# dequantise, sum and quantise again -----------------------------------------------------------


@op(
    "requantize(Tensor payloads, Tensor(a!) payload, int n, str format, int block, float factor,"
    " Tensor? residual, Tensor(b!)? left, Tensor? step, int seed, int stream, int first) -> ()"
)
def requantize_op(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    factor: float,
    residual: Tensor | None,
    left: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    total = _sum(payloads, Payload(FORMATS[format], block, n)) * factor
    quantize_op.definition(total, payload, format, block, residual, left, step, seed, stream, first)


# CPU kernels ----------------------------------------------------------------------------------

_POINTER, _INT, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_RANDOM = ctypes.POINTER(philox.Random)
_PAYLOAD = (_POINTER, _INT64, _INT64)
_QUANTIZE = (_INT, _INT, _POINTER, _INT64, _INT, _POINTER, _POINTER, _RANDOM, *_PAYLOAD)
_DEQUANTIZE = (*(_INT, _INT, *_PAYLOAD, _INT), *(_INT64, _INT, _FLOAT, _INT, _POINTER))
_REQUANTIZE = (
    *(_INT, _POINTER, _INT64, _INT, _FLOAT),
    *(_INT64, _INT, _POINTER, _POINTER, _RANDOM, *_PAYLOAD),
)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _random(step: Tensor | None, seed: int, stream: int, first: int) -> philox.Random | None:
    return None if step is None else philox.Random(seed, int(step), stream, first)


@quantize_op.kernel("cpu")
def _quantize_cpu(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    residual: Tensor | None,
    left: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    layout = Payload(FORMATS[format], block, x.numel())
    _cpu.function("quantize", *_QUANTIZE)(
        *(layout.format.number, _cpu.DTYPES[x.dtype], x.data_ptr(), layout.n, block),
        *(_address(residual), _address(left), _random(step, seed, stream, first)),
        *(payload.data_ptr(), layout.codes_at, layout.bytes),
    )


@dequantize_op.kernel("cpu")
def _dequantize_cpu(
    payloads: Tensor, out: Tensor, format: str, block: int, factor: float, accumulate: bool
) -> None:
    layout = Payload(FORMATS[format], block, out.numel())
    _cpu.function("dequantize", *_DEQUANTIZE)(
        *(layout.format.number, _cpu.DTYPES[out.dtype], payloads.data_ptr(), layout.codes_at),
        *(payloads.stride(0), len(payloads), layout.n, block, factor, accumulate, out.data_ptr()),
    )


@requantize_op.kernel("cpu")
def _requantize_cpu(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    factor: float,
    residual: Tensor | None,
    left: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    layout = Payload(FORMATS[format], block, n)
    _cpu.function("requantize", *_REQUANTIZE)(
        *(layout.format.number, payloads.data_ptr(), payloads.stride(0), len(payloads), factor),
        *(n, block, _address(residual), _address(left), _random(step, seed, stream, first)),
        *(payload.data_ptr(), layout.codes_at, layout.bytes),
    )


# CUDA kernels ---------------------------------------------------------------------------------


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return _POINTER(_address(tensor))


@quantize_op.kernel("cuda")
def _quantize_cuda(
    x: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    residual: Tensor | None,
    left: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    layout = Payload(FORMATS[format], block, x.numel())
    _cuda.launch(
        "blockwise.cu",
        f"quantize<{layout.format.cpp}, {_cuda.DTYPES[x.dtype]}, {block}>",
        x.device,
        layout.n // max(block, 256) + 1,
        (
            *(_pointer(x), _INT64(layout.n), _pointer(residual), _pointer(left), _pointer(step)),
            *(ctypes.c_uint64(seed), ctypes.c_uint32(stream), _INT64(first)),
            *(_pointer(payload), _INT64(layout.codes_at), _INT64(layout.bytes)),
        ),
    )


@dequantize_op.kernel("cuda")
def _dequantize_cuda(
    payloads: Tensor, out: Tensor, format: str, block: int, factor: float, accumulate: bool
) -> None:
    layout = Payload(FORMATS[format], block, out.numel())
    _cuda.launch(
        "blockwise.cu",
        f"dequantize<{layout.format.cpp}, {_cuda.DTYPES[out.dtype]}>",
        out.device,
        layout.n // 256 + 1,
        (
            *(_pointer(payloads), _INT64(layout.codes_at), _INT64(payloads.stride(0))),
            *(_INT(len(payloads)), _INT64(layout.n), _INT(block)),
            *(_FLOAT(factor), _INT(accumulate), _pointer(out)),
        ),
    )


@requantize_op.kernel("cuda")
def _requantize_cuda(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    factor: float,
    residual: Tensor | None,
    left: Tensor | None,
    step: Tensor | None,
    seed: int,
    stream: int,
    first: int,
) -> None:
    layout = Payload(FORMATS[format], block, n)
    _cuda.launch(
        "blockwise.cu",
        f"requantize<{layout.format.cpp}, {block}>",
        payloads.device,
        n // max(block, 256) + 1,
        (
            *(_pointer(payloads), _INT64(payloads.stride(0)), _INT(len(payloads)), _FLOAT(factor)),
            *(_INT64(n), _pointer(residual), _pointer(left), _pointer(step)),
            *(ctypes.c_uint64(seed), ctypes.c_uint32(stream), _INT64(first)),
            *(_pointer(payload), _INT64(layout.codes_at), _INT64(layout.bytes)),
        ),
    )
