"""What blockwise quantisation is, in PyTorch: the specification of the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import philox
from ._blockwise_formats import Format, Payload

__all__ = ["encode", "sum_payloads"]


def encode(c: Tensor, payload: Tensor, layout: Payload, noise: Tensor | None) -> Tensor:
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
        exponent = (safe.view(torch.int32) >> 23) - (math.frexp(form.top)[1] - 1)
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
    shares = (rows.abs() * (1 / block)).view(len(rows), block // 32, 32)
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
    mantissa = 3 if dtype == torch.float8_e4m3fn else 2
    dropped, bias = 23 - mantissa, 7 if dtype == torch.float8_e4m3fn else 15
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


def sum_payloads(payloads: Tensor, layout: Payload) -> Tensor:
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
