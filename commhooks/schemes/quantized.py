"""Defines blockwise quantisation to 8, 4, 2 or 1 bit per entry, with one scale per block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from commhooks.core._packed import BlockCodec, Pattern, Piece, Randomness, Shards, one_segment
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._traits import Biased, ErrorKind, Unbiased
from commhooks.kernels import (
    FORMATS,
    RandomBits,
    Segments,
    dequantize,
    dequantize_rotated,
    hadamard,
    payload_bytes,
    quantize,
    quantize_rotated,
    requantize,
    segments_for,
)
from commhooks.kernels._blockwise import layout_of

__all__ = ["Blockwise", "Rounding", "Undithered", "fp8", "int4", "int8", "onebit"]


Rounding = Literal["nearest", "stochastic", "dither"]
Undithered = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Blockwise(BlockCodec):
    """Sends each block of a bucket as codes of a few bits and one scale.

    A block with an entry that is not finite arrives as NaN on every rank; other blocks do not.

    Rounding to nearest is biased: use ``ErrorFeedback``. Rounding at random is unbiased, except in
    formats whose scale is a power of two ("mx_...").

    Args:
        format: "int8", "int4", "int2", "e4m3", "e5m2", "e2m1", "mx_e4m3", "mx_e5m2", "sign".
        block: entries per scale, a power of two, 32 to 2048 (1024 if rotated).
        rounding: "nearest"; "stochastic", which rounds up or down at random; or "dither", which
            shifts the grid by draws that all ranks know, for half the error: "int8", not rotated.
            "sign" takes "nearest" only.
        rotate: rotates each block by a random Hadamard matrix first, the same on all ranks, which
            spreads large entries over the block; integer formats and "sign".
        pattern: "two_phase" or "all_gather".

    Example:
        >>> hook = register(ddp_model, Blockwise("int8", 256, "dither"))

    References: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016; Wang et al.,
    SDP4Bit, 2024 (rotation). Roberts, Picture Coding Using Pseudo-Random Noise, 1962 (dither).
    """

    format: str = "int8"
    block: int = 256
    rounding: Rounding = "nearest"
    rotate: bool = False
    pattern: Pattern = "two_phase"

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        return not self.rotate and self.format != "sign"

    def __post_init__(self) -> None:
        layout_of("Blockwise", self.format, self.block, 0)  # checks format and block
        if FORMATS[self.format].dithered:
            raise ValueError("Blockwise: a dither is Blockwise('int8', rounding='dither')")
        if self.rotate and (self.block > 1024 or self.format not in _ROTATED):
            raise ValueError(
                f"Blockwise(rotate=True) takes {', '.join(_ROTATED)} and blocks of 1024 at most, "
                f"got {self.format!r} and {self.block}"
            )
        if self.rounding == "dither" and (self.format != "int8" or self.rotate):
            raise ValueError(
                f"Blockwise(rounding='dither') takes 'int8' without rotation, "
                f"got {self.format!r} and rotate={self.rotate}"
            )
        if self.stochastic and self.format == "sign":
            raise ValueError("Blockwise(rounding='stochastic'): a sign is not rounded")

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of before has ``stochastic``, and no ``rounding``: the default would be silent.
        if "rounding" not in state:
            raise ValueError("Blockwise: the pickle has no rounding; make the scheme anew")
        self.__dict__.update(state)

    @property
    def stochastic(self) -> bool:
        """Whether entries are rounded by random draws."""
        return self.rounding != "nearest"

    def to_nearest(self) -> Blockwise:
        """Returns the codec that rounds to nearest, without random draws."""
        return replace(self, rounding="nearest")

    @property
    def error(self) -> ErrorKind:
        # A scale that is a power of two may clip the largest entries, which is a bias.
        biased = not self.stochastic or self.format.startswith("mx_")
        return Biased() if biased else Unbiased(self._variance())

    def _variance(self) -> float:
        # Random rounding to a grid has a variance of a quarter of the squared spacing at most.
        form = FORMATS[self._form[0]]
        if self.format == "e2m1":
            # A spacing of half the entry or less; below the scale, of half the scale, which is at
            # most a sixth of the norm.
            return (1 + self.block / 36) / 16
        if form.float8 is not None:  # spacing of 3 or 2 bits of mantissa, relative to the entry
            return 2.0**-8 if self.format == "e4m3" else 2.0**-6
        if self.rotate:  # max^2 / top^2 / 4, with max^2 = 2 log(2 block) for N(0, 1)
            return math.log(2 * self.block) / (2 * form.top**2)
        # max^2 <= |x|^2; or |x_i| times the spacing per entry, and |x|_1 <= sqrt(block) |x|.
        return min(self.block / (4 * form.top**2), math.sqrt(self.block) / form.top)

    @property
    def _form(self) -> tuple[str, int]:
        """Returns the name of the format, as kernels know it, and the block."""
        return "dithered_int8" if self.rounding == "dither" else self.format, self.block

    def _bits(self, random: Randomness) -> RandomBits | None:
        """Returns the bits by which entries are rounded."""
        if self.rounding == "stochastic":
            return random.noise
        return self._draws(random)

    def _draws(self, random: Randomness) -> RandomBits | None:
        """Returns the random bits that decoding needs as well."""
        return random.per_phase if self.rounding == "dither" else None

    def segments(self, rows: Sequence[Sequence[int]]) -> Segments:
        return segments_for(*self._form, rows, whole=self.rotate)

    def row_bytes(self, segments: Segments) -> int:
        return payload_bytes(segments, *self._form)

    def repack_shard(
        self,
        received: Tensor,
        shards: Shards,
        index: int,
        random: Randomness,
        unsent: Tensor | None,
        weight: int,
    ) -> Tensor:
        begin, end, _ = shards[index]
        segments, row, random = shards.segments, index, random.row(index)
        packed = received.new_empty(shards[0].nbytes)
        error = into = None if unsent is None else unsent[begin:end]
        assert segments is not None
        if self.rotate:
            # Rotated payloads are summed and packed as they are: the same rotation holds for all,
            # and a second rounding needs no other. Only the error is rotated back.
            slots = one_segment(self, segments.slots)
            into = None if error is None else error.new_empty(segments.slots)
        requantize(
            *(received, packed, slots if self.rotate else segments, *self._form),
            row=0 if self.rotate else row,
            factor=1.0 / len(received),
            unsent=into,
            weight=float(weight),
            accumulate=not self.rotate,
            received=self._draws(random.first),
            random=self._bits(random),
        )
        if self.rotate and error is not None and into is not None:
            turn = (self.block, random.shared)
            hadamard(
                *(into, error, *turn), segments=segments, row=row, inverse=True, accumulate=True
            )
        return packed

    def encode(
        self, piece: Piece, payload: Tensor, segments: Segments, row: int, random: Randomness
    ) -> None:
        x, residual, unsent = piece
        if self.rotate:
            quantize_rotated(
                *(x, payload, *self._form, random.shared),
                segments=segments,
                row=row,
                residual=residual,
                unsent=unsent,
                random=self._bits(random),
            )
        else:
            rank, ranks = random.member
            quantize(
                *(x, payload, *self._form),
                segments=segments,
                row=row,
                residual=residual,
                unsent=unsent,
                random=self._bits(random),
                rank=rank,
                ranks=ranks,
            )

    def decode(
        self,
        payloads: Tensor,
        out: Tensor,
        segments: Segments,
        row: int,
        random: Randomness,
        factor: float,
    ) -> None:
        if self.rotate:
            turn = random.shared
            dequantize_rotated(
                payloads, out, *self._form, turn, segments=segments, row=row, factor=factor
            )
        else:
            dequantize(
                *(payloads, out, *self._form),
                segments=segments,
                row=row,
                factor=factor,
                random=self._draws(random),
            )


_ROTATED = ("int8", "int4", "int2", "sign")


@register_scheme("int8")
def int8(
    *, block: int = 256, rounding: Rounding = "dither", pattern: Pattern = "two_phase"
) -> Scheme:
    """Sends 8-bit integers in blocks of 256: 8.125 bits per entry, unbiased, without state.

    Args:
        block: entries per scale, a power of two, 32 to 2048.
        rounding: "dither", unbiased; "stochastic", unbiased with twice the error, whose payloads
            decode without draws; "nearest", biased.
        pattern: "two_phase", or "all_gather".
    """
    return Blockwise("int8", block, rounding, pattern=pattern)


@register_scheme("fp8")
def fp8(
    *,
    format: Literal["e4m3", "e5m2", "mx_e4m3", "mx_e5m2"] = "e4m3",
    block: int | None = None,
    rounding: Undithered | None = None,
    pattern: Pattern = "two_phase",
) -> Scheme:
    """Sends 8-bit floats in blocks of 256: small entries keep their digits.

    The error is 28 times that of int8 on normal entries, and 3 times on those of a t(3).

    Args:
        format: "e4m3" (three bits of mantissa) or "e5m2" (two), with a float32 scale per block;
            "mx_e4m3" or "mx_e5m2", OCP MX: a power of two per 32 entries, to nearest, 8.25 bits
            per entry, biased.
        block: entries per scale, a power of two, 32 to 2048; None: 256, and 32 of MX.
        rounding: "stochastic", up or down at random, unbiased; or "nearest". None: stochastic, and
            to nearest of MX.
        pattern: as for int8.
    """
    if not format.startswith("mx_"):
        return Blockwise(
            format, 256 if block is None else block, rounding or "stochastic", pattern=pattern
        )
    if block not in (None, 32) or rounding not in (None, "nearest"):
        raise ValueError(
            f"fp8(format={format!r}) has blocks of 32 and rounds to nearest, as MX does; got "
            f"block={block} and rounding={rounding!r}: leave both out, or take format='e4m3'"
        )
    return Blockwise(format, 32, pattern=pattern)


@register_scheme("int4")
def int4(
    *,
    block: int = 256,
    rounding: Undithered = "nearest",
    rotate: bool = True,
    pattern: Pattern = "two_phase",
) -> Scheme:
    """Sends 4-bit integers of rotated blocks: 4.125 bits per entry.

    Args:
        block: entries per scale and rotation; a power of two, 64 to 1024.
        rounding: "nearest", or "stochastic", up or down at random, unbiased.
        rotate: rotates blocks first; False: a few large entries cost the others their precision.
        pattern: "two_phase", or "all_gather".
    """
    return Blockwise("int4", block, rounding, rotate, pattern)


@register_scheme("onebit")
def onebit(*, block: int = 2048, rotate: bool = False, pattern: Pattern = "two_phase") -> Scheme:
    """Sends signs and the mean magnitude of each block: 1.016 bits per entry.

    Converges with error feedback only; for Adam see the scheme's page. Where most entries of a
    gradient are exactly zero and only a share p is not, the residual grows to 1 / (2 p) gradients,
    and large learning rates diverge: rotate blocks in that case.

    Args:
        block: entries per scale, a power of two, 32 to 2048.
        rotate: rotates blocks first (1024 at most), which keeps the residual at 1 to 2 gradients.
        pattern: "two_phase", or "all_gather".

    References: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error
    Feedback Fixes SignSGD, 2019; Tang et al., 1-bit Adam, 2021 (two phases).
    """
    return Blockwise("sign", block, rotate=rotate, pattern=pattern)
