"""Blockwise formats: what a block's scale and an entry's code are, and where a payload has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .runtime.arguments import check_whole, whole

__all__ = ["ALIGNMENT", "FORMATS", "Format", "Payload", "layout_of", "payload_bytes"]

ALIGNMENT = 16
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
        return -(-self.blocks * self.format.scale_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def code_bytes(self) -> int:
        return -(-self.n // self.format.unit) * self.format.unit * self.format.bits // 8

    @property
    def bytes(self) -> int:
        return -(-(self.codes_at + self.code_bytes) // ALIGNMENT) * ALIGNMENT


def layout_of(caller: str, format: str, block: Any, n: int) -> Payload:
    """The layout of a payload of ``n`` entries; ValueError if the format has no such block."""
    found = FORMATS.get(format) if isinstance(format, str) else None
    if found is None:
        raise ValueError(f"{caller}(format): one of {', '.join(FORMATS)}, got {format!r}")
    block = whole(caller, "block", block)
    if block not in _BLOCKS or block < found.unit:
        allowed = ", ".join(str(b) for b in _BLOCKS if b >= found.unit)
        raise ValueError(f"{caller}(block): {format} takes one of {allowed}, got {block!r}")
    return Payload(found, block, n)


def payload_bytes(n: int, format: str, block: int) -> int:
    """Bytes of the payload of ``n`` entries."""
    n = whole("payload_bytes", "n", n)
    check_whole("payload_bytes", "n", n, 0, 2**56)
    return layout_of("payload_bytes", format, block, n).bytes
