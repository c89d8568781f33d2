"""Declares the blockwise formats and their payloads, and checks the arguments of their ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._tables import once_per_table
from .runtime.arguments import check_whole, whole
from .segments import Segments, segments_of

__all__ = [
    "ALIGNMENT",
    "FORMATS",
    "Format",
    "Message",
    "Payload",
    "check_draws",
    "check_form",
    "check_message",
    "check_messages",
    "layout_for",
    "layout_of",
    "message_of",
    "one_segment",
    "payload_bytes",
    "segments_for",
]


ALIGNMENT = 16  # bytes; of every row of a matrix of payloads
# Multiples of a warp's 32 lanes; 2048 entries are 64 registers of a lane.
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Format:
    """Describes a blockwise format.

    Attributes:
        number: its number in CPU kernels, see ``with_format`` of ``include/blockwise_cpu.h``.
        cpp: its type in C++.
        bits: bits per code.
        scale_bytes: 4 for a float32 scale, 1 for a power of two.
        tiny: blocks whose largest magnitude is below this decode to zero.
        float8: dtype of the codes of 8-bit floats.
        mantissa: bits of the mantissa of floats; 0 for integers and signs.
        dithered: values are shifted by draws that the decoder needs.
    """

    number: int
    cpp: str
    bits: int
    scale_bytes: int = 4
    tiny: float = 2.0**-120  # 127 / max must not overflow
    float8: torch.dtype | None = None
    mantissa: int = 0
    dithered: bool = False

    @cached_property
    def top(self) -> float:
        """Returns the largest value of a code."""
        if self.float8 is not None:
            return torch.finfo(self.float8).max
        if self.mantissa:
            return _LARGEST_E2M1
        return 2.0 ** (self.bits - 1) - (1.5 if self.dithered else 1.0)

    @cached_property
    def bias(self) -> int:
        """Returns the bias of the exponent of floats."""
        exponent_bits = self.bits - 1 - self.mantissa
        return int(2 ** (exponent_bits - 1)) - 1

    @cached_property
    def planes(self) -> int:
        """Returns how many codes of entries 32 apart share a byte; 1 for signs."""
        return 1 if self.bits == 1 else 8 // self.bits

    @cached_property
    def unit(self) -> int:
        """Returns the number of entries whose codes are stored together; divides every block."""
        return 32 * self.planes


_LARGEST_E2M1 = 6.0  # of 0, 0.5, 1, 1.5, 2, 3, 4, 6, for which torch has no dtype to compute with
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {
    "int8": Format(0, "Int8", 8),
    "int4": Format(1, "Int4", 4),
    "int2": Format(2, "Int2", 2),
    # 448 / 2^-120 would overflow.
    "e4m3": Format(3, "E4M3Scaled", 8, tiny=2.0**-110, float8=_E4M3, mantissa=3),
    "e5m2": Format(4, "E5M2Scaled", 8, tiny=2.0**-110, float8=_E5M2, mantissa=2),
    "mx_e4m3": Format(5, "E4M3MX", 8, 1, float8=_E4M3, mantissa=3),
    "mx_e5m2": Format(6, "E5M2MX", 8, 1, float8=_E5M2, mantissa=2),
    "sign": Format(7, "Sign", 1),
    "e2m1": Format(8, "E2M1Scaled", 4, mantissa=1),
    "dithered_int8": Format(9, "DitheredInt8", 8, dithered=True),
}


class Payload(NamedTuple):
    """Locates the parts of a payload: scales, codes, and entries of 16 bits.

    Attributes:
        n: coded entries.
        tails: entries of 16 bits.
        codes_at: position of the first code, in bytes.
        tails_at: position of the first entry of 16 bits, in bytes.
        bytes: length, a multiple of 16.
    """

    format: Format
    block: int
    n: int
    tails: int
    codes_at: int
    tails_at: int
    bytes: int

    @classmethod
    def of(cls, format: Format, block: int, n: int, tails: int = 0) -> Payload:
        codes_at = _aligned(-(-n // block) * format.scale_bytes)
        tails_at = codes_at + -(-n // format.unit) * format.unit * format.bits // 8
        return cls(format, block, n, tails, codes_at, tails_at, _aligned(tails_at + 2 * tails))


def _aligned(bytes: int) -> int:
    return -(-bytes // ALIGNMENT) * ALIGNMENT


def segments_for(
    format: str, block: int, rows: Sequence[Sequence[int]], *, whole: bool = False
) -> Segments:
    """Returns the blocks of a message with these segments in its rows.

    Args:
        whole: nothing is in 16 bits. For rotated blocks, where it would gain little: the noise that
            the rotation spreads over the zeros of a short block is dropped.
    """
    check_form("segments_for", format, block)
    return Segments(rows, *_granule(format, block, whole))


def _granule(format: str, block: int, whole: bool) -> tuple[int, int]:
    """Returns the slots that a run begins at multiples of, and the largest rest in 16 bits."""
    granule = max(256, block)
    return granule, 0 if whole else Payload.of(FORMATS[format], block, granule).bytes // 2


@lru_cache(maxsize=4096)
def one_segment(format: str, block: int, n: int, whole: bool = False) -> Segments:
    """Returns the blocks of a payload whose entries are one segment."""
    return segments_for(format, block, [[n]], whole=whole)


def layout_of(caller: str, format: str, block: Any, n: int, tails: int = 0) -> Payload:
    """Returns the layout of a payload; raises ValueError for an unknown format or block."""
    check_form(caller, format, block)
    return Payload.of(FORMATS[format], int(block), n, tails)


@once_per_table
def layout_for(table: Tensor, caller: str, format: str, block: int) -> Payload:
    """Returns the layout of a row of the message that a table describes."""
    segments = segments_of(table, caller)
    return layout_of(caller, format, block, segments.slots, segments.tails)


class Message(NamedTuple):
    """Describes what an op encodes or decodes: a message, or a row of one.

    Attributes:
        layout: that of each row.
        rows: the number of rows.
        n: entries in all of these rows.
        shapes: those that the tensor of a payload may have.
        places: where kernels find the codes, the entries of 16 bits and the next payload.
    """

    layout: Payload
    rows: int
    n: int
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[int, int, int]


@once_per_table
def message_of(table: Tensor, caller: str, format: str, block: int, row: int) -> Message:
    """Returns the message, or the row of it, that an op works on.

    Raises:
        ValueError: an argument is wrong; the message names it.
    """
    segments, layout = segments_of(table, caller), layout_for(table, caller, format, block)
    if segments.granule % block:
        raise ValueError(
            f"{caller}(segments): made for blocks that divide {segments.granule}, got {block}"
        )
    rows = len(segments.rows)
    check_whole(caller, "row", row, -1, rows)
    check_whole(caller, "rows of segments", rows, 1, 2**16)  # a grid's second dimension
    rows = rows if row < 0 else 1
    begin, end = segments.row(row)
    shapes = ((rows, layout.bytes), (layout.bytes,))[: 2 if rows == 1 else 1]
    places = (layout.codes_at, layout.tails_at, layout.bytes)
    return Message(layout, rows, end - begin, shapes, places)


def check_form(caller: str, format: str, block: Any) -> None:
    """Raises ValueError for an unknown format, or a block size that the format does not take."""
    known = FORMATS.get(format) if isinstance(format, str) else None
    if known is None:
        raise ValueError(f"{caller}(format): one of {', '.join(FORMATS)}, got {format!r}")
    if whole(caller, "block", block) not in _BLOCKS or block < known.unit:
        allowed = ", ".join(str(b) for b in _BLOCKS if b >= known.unit)
        raise ValueError(f"{caller}(block): {format} takes one of {allowed}, got {block!r}")


def payload_bytes(n: int | Segments, format: str, block: int) -> int:
    """Returns the number of bytes of the payload of ``n`` entries, or of a row of a message."""
    check_form("payload_bytes", format, block)
    if isinstance(n, Segments):
        return Payload.of(FORMATS[format], block, n.slots, n.tails).bytes
    n = whole("payload_bytes", "n", n)
    check_whole("payload_bytes", "n", n, 0, 2**56)
    # As Segments counts them, but in terms that torch.compile traces.
    granule, most = _granule(format, block, False)
    tails = n % granule if n % granule <= most else 0
    slots = -(-(n - tails) // granule) * granule
    return Payload.of(FORMATS[format], block, slots, tails).bytes


# ---- checks


def check_message(
    caller: str, payload: Tensor, format: str, block: int, table: Tensor, row: int, n: int
) -> None:
    """Raises unless ``payload`` is a message of ``n`` entries, or the row of one."""
    message = _message_of(caller, format, block, table, row, n)
    if payload.shape not in message.shapes:
        _raise_size(caller, "payload", "", message, payload)


def check_messages(
    caller: str, payloads: Tensor, format: str, block: int, table: Tensor, row: int, n: int
) -> None:
    """Raises unless ``payloads`` holds messages of ``n`` entries, one or more."""
    message = _message_of(caller, format, block, table, row, n)
    shape = payloads.shape
    if shape[1:] not in message.shapes or not shape[0]:
        _raise_size(caller, "payloads", "1 or more, ", message, payloads)


def _message_of(caller: str, format: str, block: int, table: Tensor, row: int, n: int) -> Message:
    message = message_of(table, caller, format, block, row)
    if message.n != n:
        raise ValueError(f"{caller}(segments): of {message.n} entries, got {n}")
    return message


def _raise_size(caller: str, name: str, before: str, message: Message, payloads: Tensor) -> None:
    nbytes = message.layout.bytes
    raise ValueError(
        f"{caller}({name}): shape ({before}{message.rows}, {nbytes}), {nbytes} bytes a row, "
        f"got {tuple(payloads.shape)}; see payload_bytes"
    )


def check_draws(
    caller: str, format: str, step: Tensor | None, *, encoder: bool = False, name: str = "random"
) -> None:
    """Raises unless a decoder has draws for a dithered format, and for no other.

    Args:
        encoder: other formats may have draws, too.
    """
    dithered = FORMATS[format].dithered
    if dithered and step is None:
        raise ValueError(f"{caller}({name}): {format} needs the bits of a dither, got None")
    if not dithered and step is not None and not encoder:
        raise ValueError(f"{caller}({name}): has to be None, as {format} is not dithered")
