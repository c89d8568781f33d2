"""Blockwise quantisation: 8, 4 and 1 bit an entry, one scale per block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core.packed import PackedCodec, Pattern, Piece, Randomness
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Scheme
from commhooks.core.traits import Biased, ErrorKind, Unbiased
from commhooks.kernels import (
    FORMATS,
    dequantize,
    dequantize_rotated,
    hadamard,
    payload_bytes,
    quantize,
    quantize_rotated,
    requantize,
)
from commhooks.kernels._blockwise_formats import layout_of

__all__ = ["Blockwise", "fp8", "int4", "int8", "mxfp8", "onebit"]


@dataclass(frozen=True)
class Blockwise(PackedCodec):
    """Sends each block of a bucket as codes of a few bits and one scale.

    A block with an entry that is not finite arrives as NaN, on every rank; no other does.

    Rounding to nearest is biased: use ``ErrorFeedback``. Stochastic rounding is not, but for
    formats with a scale of a power of two ("mx_...") and for "sign".

    Args:
        format: a key of ``commhooks.kernels.FORMATS``: "int8", "int4", "int2", "e4m3", "e5m2",
            "mx_e4m3", "mx_e5m2", "sign".
        block: entries per scale, a power of two, 32 to 2048 (1024 if rotated).
        stochastic: rounds up or down at random, right on average.
        rotate: rotates each block by a random Hadamard matrix first, the same on all ranks, so that
            no entry stands out; integer formats and "sign".
        pattern: "two_phase" or "all_gather".

    Example:
        >>> hook = register(ddp_model, Blockwise("int8", 256, stochastic=True))

    References: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016; Wang et al.,
    SDP4Bit, 2024 (rotation).
    """

    format: str = "int8"
    block: int = 256
    stochastic: bool = False
    rotate: bool = False
    pattern: Pattern = "two_phase"

    def __post_init__(self) -> None:
        layout_of("Blockwise", self.format, self.block, 0)  # checks format and block
        if self.rotate and (self.block > 1024 or self.format not in _ROTATED):
            raise ValueError(
                f"Blockwise(rotate=True) takes {', '.join(_ROTATED)} and blocks of 1024 at most, "
                f"got {self.format!r} and {self.block}"
            )
        if self.stochastic and self.format == "sign":
            raise ValueError("Blockwise(stochastic=True): a sign is not rounded")

    @property
    def error(self) -> ErrorKind:
        biased = not self.stochastic or self.format.startswith("mx_")
        return Biased() if biased else Unbiased(self._variance())

    def _variance(self) -> float:
        form = FORMATS[self.format]
        if form.float8 is not None:  # half a spacing at most, squared
            return 2.0**-8 if self.format == "e4m3" else 2.0**-6
        if self.rotate:  # the largest of a block of normal entries
            return math.log(2 * self.block) / (2 * form.top**2)
        return min(self.block / (4 * form.top**2), math.sqrt(self.block) / form.top)

    @property
    def granularity(self) -> int:
        return self.block

    def _padded(self, n: int) -> int:
        return -(-n // self.block) * self.block if self.rotate else n

    def payload_bytes(self, n: int) -> int:
        return payload_bytes(self._padded(n), self.format, self.block)

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        noise = random.noise if self.stochastic else None
        x, residual, unsent = piece
        if not self.rotate:
            form = (self.format, self.block)
            quantize(x, payload, *form, residual=residual, unsent=unsent, random=noise)
            return
        n, missing = x.numel(), -x.numel() % self.block
        into = unsent
        if missing:
            x = pad(x, (0, missing))
            residual = None if residual is None else pad(residual, (0, missing))
            into = None if unsent is None else torch.empty_like(x, dtype=torch.float32)
        settings = (self.format, self.block, random.shared)
        quantize_rotated(x, payload, *settings, residual=residual, unsent=into, random=noise)
        if missing and unsent is not None and into is not None:
            unsent.copy_(into[:n])

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        if not self.rotate:
            dequantize(payloads, out, self.format, self.block, factor=factor)
            return
        n = out.numel()
        whole = out if n % self.block == 0 else out.new_empty(self._padded(n))
        form = (self.format, self.block, random.shared)
        dequantize_rotated(payloads, whole, *form, factor=factor)
        if whole is not out:
            out.copy_(whole[:n])

    def repack(
        self,
        payloads: Tensor,
        payload: Tensor,
        n: int,
        random: Randomness,
        factor: float,
        unsent: Tensor | None = None,
    ) -> None:
        noise = random.noise if self.stochastic else None
        form = (self._padded(n), self.format, self.block)
        into = unsent
        if self.rotate and unsent is not None:
            into = unsent.new_empty(self._padded(n))
        requantize(payloads, payload, *form, factor=factor, unsent=into, random=noise)
        if self.rotate and unsent is not None and into is not None:
            hadamard(into, into, self.block, random.shared, inverse=True)
            unsent.copy_(into[:n])


_ROTATED = ("int8", "int4", "int2", "sign")


@register_scheme("int8")
def int8(*, block: int = 256, stochastic: bool = True, pattern: Pattern = "two_phase") -> Scheme:
    """8-bit integers in blocks of 256: 8.125 bits an entry, unbiased, without memory.

    Args:
        block: entries per scale, a power of two, 32 to 2048.
        stochastic: False rounds to nearest: half the error, but with a bias.
        pattern: "two_phase", or "all_gather".
    """
    return Blockwise("int8", block, stochastic, pattern=pattern)


@register_scheme("fp8")
def fp8(
    *,
    format: str = "e4m3",
    block: int = 256,
    stochastic: bool = True,
    pattern: Pattern = "two_phase",
) -> Scheme:
    """8-bit floats in blocks of 256. Ten times the error of int8, but small entries keep digits.

    Args:
        format: "e4m3" (three bits of mantissa) or "e5m2" (two).
        block, stochastic, pattern: as for int8.
    """
    if format not in ("e4m3", "e5m2"):
        raise ValueError(f"fp8(format=...) is 'e4m3' or 'e5m2', got {format!r}")
    return Blockwise(format, block, stochastic, pattern=pattern)


@register_scheme("mxfp8")
def mxfp8(*, format: str = "e4m3", pattern: Pattern = "two_phase") -> Scheme:
    """8-bit floats with a power of two per 32 entries (OCP Microscaling): 8.25 bits an entry."""
    if format not in ("e4m3", "e5m2"):
        raise ValueError(f"mxfp8(format=...) is 'e4m3' or 'e5m2', got {format!r}")
    return Blockwise(f"mx_{format}", 32, pattern=pattern)


@register_scheme("int4")
def int4(
    *,
    block: int = 256,
    stochastic: bool = False,
    rotate: bool = True,
    pattern: Pattern = "two_phase",
) -> Scheme:
    """4-bit integers of rotated blocks: 4.125 bits an entry.

    Args:
        block: entries per scale, and of the rotation; a power of two, 64 to 1024.
        stochastic: unbiased instead of near.
        rotate: False leaves entries where they are; heavy tails then cost precision.
        pattern: "two_phase", or "all_gather".
    """
    return Blockwise("int4", block, stochastic, rotate, pattern)


@register_scheme("onebit")
def onebit(*, block: int = 2048, rotate: bool = False, pattern: Pattern = "two_phase") -> Scheme:
    """Signs, and the mean magnitude of each block: 1.016 bits an entry.

    Converges with error feedback only; with Adam see the scheme's page. Where most entries of a
    gradient are exact zeros, a share p not, the residual grows to 1 / (2 p) gradients and large
    learning rates diverge: rotate blocks there.

    Args:
        block: entries per scale, a power of two, 32 to 2048.
        rotate: rotates blocks first (1024 at most); the residual is then 1 to 2 gradients at most.
        pattern: "two_phase", or "all_gather".

    References: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error
    Feedback Fixes SignSGD, 2019; Tang et al., 1-bit Adam, 2021 (two phases).
    """
    return Blockwise("sign", block, rotate=rotate, pattern=pattern)
