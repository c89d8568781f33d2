"""Defines blockwise quantisation in PyTorch: the specification of the kernels.

It is written to be read and to be exact, not to be fast: where it differs from the shortest code,
the reason is that a kernel has to give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import philox
from ._blockwise import Format, Payload
from .cast import stochastic
from .segments import Segments

__all__ = ["decode_row", "encode", "encode_row", "sum_payloads"]


def encode_row(
    c: Tensor,
    payload: Tensor,
    layout: Payload,
    segments: Segments,
    row: int,
    noise: Tensor | None,
    tails: Tensor | None,
) -> Tensor:
    """Writes the payload of a row, with entries ``c``; returns what the payload leaves out.

    Args:
        noise: half-words for all slots, or the draws of a dither.
        tails: half-words for the entries of 16 bits.
    """
    slots, entries = segments.coded(row, c.device)
    inside = c.new_zeros(layout.n)
    inside[slots] = c[entries]
    counts = segments.counts(row, layout.block, c.device).clamp(min=1.0)
    left_out = torch.empty_like(c)
    left_out[entries] = encode(inside, payload, layout, noise, counts)[slots]
    entries = segments.in_16_bits(row, c.device)
    tail = c[entries]
    if tails is not None:
        here = tails[: len(tail)].to(torch.int32)
        narrow = stochastic(tail, torch.bfloat16, here).to(torch.bfloat16)
    else:
        narrow = tail.to(torch.bfloat16)
    # Torch's conversions have several NaNs, and processors give that of a sum either sign.
    bits = narrow.view(torch.int16).masked_fill(narrow.isnan(), 0x7FC0)
    payload[layout.tails_at : layout.tails_at + 2 * len(tail)] = bits.view(torch.uint8)
    left_out[entries] = tail - narrow.to(torch.float32)
    return left_out


def encode(
    c: Tensor,
    payload: Tensor,
    layout: Payload,
    noise: Tensor | None,
    counts: Tensor | None = None,
) -> Tensor:
    """Writes scales and codes of flat ``c``; returns what they leave out.

    Args:
        counts: entries of each block that are no padding; None: all but the end of the last block.
    """
    form, n = layout.format, c.numel()
    # Zeros in a block change no maximum; the mean magnitude divides by the true count.
    rows = pad(c, (0, -n % layout.block)).view(-1, layout.block)
    if counts is None:
        counts = torch.full((len(rows),), float(layout.block), dtype=torch.float32, device=c.device)
        if n % layout.block:
            counts[-1] = n % layout.block
    largest = rows.abs().amax(1)  # amax propagates NaN
    finite = largest.isfinite()
    dead = ~finite | (largest < form.tiny)
    safe = torch.where(dead, 1.0, largest)
    # A tensor, since torch divides by multiplying with the reciprocal where one side is a number,
    # which flips one code in a million (docs/design/kernels.md).
    top = torch.full_like(safe, form.top)
    if form.bits == 1:
        scale = _mean_magnitude(rows, counts)
        inverse = torch.ones_like(scale)
    elif form.scale_bytes == 1:
        # A power of two by exponent bits, as log2 may round up: the largest magnitude's exponent
        # less that of the format's largest value. 254 - exponent is the exponent of the inverse.
        exponent = (safe.view(torch.int32) >> 23) - (math.frexp(form.top)[1] - 1)
        exponent = exponent.clamp(min=1)
        scale = (exponent << 23).view(torch.float32)
        inverse = ((254 - exponent) << 23).view(torch.float32)
    else:
        scale, inverse = safe / top, top / safe
    scale = torch.where(finite, torch.where(dead, 0.0, scale), torch.nan)
    # A dead block has codes of zero; its scale of 0 or NaN then decides what all entries decode to.
    y = torch.where(dead[:, None], 0.0, rows * inverse[:, None])
    if noise is not None:
        noise = pad(noise, (0, -n % layout.block)).view(rows.shape)
    codes = _codes(y, form, noise)
    values = _values(codes, form, noise)

    payload.zero_()  # the padding is sent, and equal gradients give equal bytes
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
    """Returns the mean magnitudes, summed in the order of the kernels.

    Within 512 entries, entry i goes to sum i % 32, and then halves are added to halves; the sums of
    512 entries are added one after the other, so that several warps can share a block.
    """
    block = rows.shape[1]
    # Divided before the sum, which would overflow for large magnitudes. The factor is a power of
    # two, so only denormal numbers are rounded by it.
    shares = rows.abs() * (1 / block)
    parts = [_sum_by_halves(part) for part in shares.split(512, 1)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total * (torch.full_like(counts, block) / counts)


def _sum_by_halves(rows: Tensor) -> Tensor:
    sums = torch.zeros_like(rows[:, :32])
    for part in rows.split(32, 1):
        sums = sums + part
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _codes(y: Tensor, form: Format, noise: Tensor | None) -> Tensor:
    """Returns the codes of scaled entries as int32."""
    if form.dithered and noise is not None:
        return _dithered(y, noise)
    if form.bits == 1:
        return (y < 0).to(torch.int32)
    if not form.mantissa:
        # Noise could carry an entry past the largest code. Rounding to nearest needs no clamp, as
        # max * (L / max) is L up to rounding.
        if noise is not None:
            y = y.clamp(-form.top, form.top) + philox.centred(noise)
        return y.round().to(torch.int32) & (1 << form.bits) - 1
    if noise is None and form.float8 is not None:
        # torch's conversion to e4m3fn does not saturate: above 464 it gives NaN.
        codes = y.clamp(-form.top, form.top).to(form.float8).view(torch.uint8)
        return codes.to(torch.int32)
    return _float_codes(y, form, noise)


def _dithered(y: Tensor, draws: Tensor) -> Tensor:
    """Returns codes of integers k: 0 stands for 0, and others for k - d with d uniform.

    Below 1 the first value on the entry's side is taken where |y + d| > (d^2 + 3/4) / 2, so that
    the mean is y; other entries take the nearest value. ``docs/design/kernels.md`` has the
    derivation.
    """
    # 22 bits decide whether a value is taken, as entries may be tiny; 14 of them shift the grid.
    d = philox.below_half(draws, 23)
    sums = y + d
    taken = sums.abs() > d * 0.5 * d + 0.375
    near = torch.where(taken, sums.abs().clamp(min=0.75).copysign(sums), 0.0)
    return near.round().to(torch.int32) & 0xFF


def _shift(draws: Tensor) -> Tensor:
    return philox.below_half(draws, 15)


def _float_codes(y: Tensor, form: Format, noise: Tensor | None) -> Tensor:
    """Rounds to floats of few bits: adds bits below the last place and truncates.

    Random bits are uniform; without them, half a place and the last bit round ties to even.
    """
    mantissa, bias = form.mantissa, form.bias
    dropped = 23 - mantissa
    # A carry from mantissa to exponent is the next float, as it should be.
    magnitude = y.view(torch.int32) & 0x7FFFFFFF
    if noise is None:
        below = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1)
    else:
        # The 16 random bits are the highest below the last place, and a half of the lowest of them
        # is added, so that the mean of what is added is exactly half of a place.
        below = (noise << (dropped - 16) | 1 << (dropped - 17)).to(torch.int32)
    normal = (magnitude + below >> dropped) - ((127 - bias) << mantissa)
    # Below the smallest normal number, all numbers of the format are multiples of one place.
    places = y.abs() * 2.0 ** (bias - 1 + mantissa)
    if noise is not None:
        places = places + philox.centred(noise)
    denormal = places.round().clamp(max=255).to(torch.int32)
    codes = torch.where(y.abs() < 2.0 ** (1 - bias), denormal, normal).clamp(max=_top_code(form))
    sign = 1 << (form.bits - 1)
    return codes | torch.where(y.view(torch.int32) < 0, sign, 0)


def _top_code(form: Format) -> int:
    """Returns the code of the largest value."""
    if form.float8 is None:
        return int(2 ** (form.bits - 1)) - 1
    top = torch.tensor(form.top, dtype=form.float8, device="cpu")
    return int(top.view(torch.uint8).item())


def _values(codes: Tensor, form: Format, draws: Tensor | None = None) -> Tensor:
    """Returns the values of codes before the scale; ``draws`` are those of a dither."""
    if form.bits == 1:
        return 1.0 - 2.0 * codes
    if form.float8 is not None:
        return codes.to(torch.uint8).view(form.float8).to(torch.float32)
    if form.mantissa:
        values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        table = torch.tensor(
            [*values, *(-value for value in values)], dtype=torch.float32, device=codes.device
        )
        return table[codes.long()]
    wide = 32 - form.bits  # shifting up and down again extends the sign
    integers = (codes << wide >> wide).to(torch.float32)
    if not form.dithered or draws is None:
        return integers
    return torch.where(integers == 0, 0.0, integers - _shift(draws))


def _pack(codes: Tensor, form: Format) -> Tensor:
    """Packs int32 codes into bytes."""
    per_byte = 8 // form.bits
    # A ballot of a CUDA warp gives 32 consecutive signs; other codes are packed from registers of a
    # lane, which hold entries 32 apart.
    if form.bits == 1:
        parts = codes.view(-1, 8)
    else:
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


def decode_row(
    payloads: Tensor,
    layout: Payload,
    segments: Segments,
    row: int,
    draws: Sequence[Tensor] | None = None,
) -> Tensor:
    """Returns the float32 sum of the decoded payloads of a row, added in their order.

    Args:
        draws: of a dither, for all slots, for each payload.
    """
    begin, end = segments.row(row)
    total = torch.empty(end - begin, dtype=torch.float32, device=payloads.device)
    slots, entries = segments.coded(row, payloads.device)
    total[entries] = sum_payloads(payloads, layout, layout.n, draws)[slots]
    entries = segments.in_16_bits(row, payloads.device)
    # A slice of bytes need not be aligned for 16 bits.
    tails = payloads[:, layout.tails_at : layout.tails_at + 2 * len(entries)].clone()
    if len(entries):
        rows = tails.view(torch.bfloat16).to(torch.float32)
        total[entries] = _added(list(rows))
    return total


def sum_payloads(
    payloads: Tensor, layout: Payload, n: int, draws: Sequence[Tensor] | None = None
) -> Tensor:
    """Returns the float32 sum of the decoded payloads of ``n`` entries, added in their order."""
    each: Sequence[Tensor | None] = draws or [None] * len(payloads)
    return _added(
        [
            _decode(payload, layout, n, draws_of_payload)
            for payload, draws_of_payload in zip(payloads, each, strict=True)
        ]
    )


def _added(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _decode(payload: Tensor, layout: Payload, n: int, draws: Tensor | None = None) -> Tensor:
    form, blocks = layout.format, -(-n // layout.block)
    stored = payload[: blocks * form.scale_bytes]
    if form.scale_bytes == 1:
        scale = (stored.to(torch.int32) << 23).view(torch.float32)
        scale = scale.masked_fill(stored == 255, torch.nan)
    else:
        # A slice of bytes need not be aligned for float32.
        scale = stored.clone().view(torch.float32)
    code_bytes = -(-n // form.unit) * form.unit * form.bits // 8
    packed = payload[layout.codes_at : layout.codes_at + code_bytes]
    values = _values(_unpack(packed, form)[:n], form, draws)
    rows = pad(values, (0, -n % layout.block)).view(-1, layout.block)
    return (rows * scale[:, None]).view(-1)[:n]
