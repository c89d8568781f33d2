"""Defines QSGD and TernGrad, for reference: random rounding to few levels of a block's norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core.bucket import Bucket
from commhooks.core.registry import register_scheme
from commhooks.core.scheme import Codec, Scheme
from commhooks.core.traits import Traits, Unbiased

__all__ = ["QSGD", "TernGrad"]


def _check_block(scheme: Scheme, block: int) -> None:
    if block < 1:
        raise ValueError(
            f"{type(scheme).__name__}(block=...) is a whole number, 1 or more, got {block!r}"
        )


def _blocks(x: Tensor, block: int) -> Tensor:
    """Returns the entries in float32, a row per block; the last is padded with zeros."""
    return pad(x.to(torch.float32), (0, -x.numel() % block)).view(-1, block)


def _uniform(shape: torch.Size, bucket: Bucket, name: str, like: Tensor) -> Tensor:
    """Draws from [0, 1), differently on each rank: errors then average out over ranks."""
    generator = bucket.generator(f"{bucket.layout.names[0]}/{name}", shared=False)
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device)


@register_scheme("qsgd")
@dataclass(frozen=True)
class QSGD(Codec):
    """Sends levels of each block's Euclidean norm, rounded at random: unbiased, without memory.

    For reference: the norm is far above most entries, so 8-bit integers of the block's maximum
    (``int8``) have a fifth of the squared error for as many bytes. Variance: at most
    min(block / levels^2, sqrt(block) / levels). Payload: 8 bits per entry and 32 per block.

    Args:
        levels: number of levels, 1 to 127. Fewer levels do not save bytes: codes are not of
            variable length here.
        block: entries per norm.

    Reference: Alistarh et al., QSGD, 2017.
    """

    levels: int = 127
    block: int = 128

    def __post_init__(self) -> None:
        _check_block(self, self.block)
        if not 1 <= self.levels <= 127:
            raise ValueError(f"QSGD(levels=...) is 1 to 127, got {self.levels!r}")

    @property
    def traits(self) -> Traits:
        variance = min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)
        return Traits(error=Unbiased(variance))

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        rows = _blocks(gradient, self.block)
        # In float64, as squares leave the range of float32 long before entries do.
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).to(torch.float32)
        safe = torch.where((norms > 0) & norms.isfinite(), norms, 1.0)
        level = rows.abs() * (self.levels / safe)[:, None]
        # Adding a uniform number and rounding down rounds up with the probability of the fraction.
        up = _uniform(rows.shape, bucket, "qsgd", rows)
        codes = (level + up).floor().clamp(max=self.levels).nan_to_num(0.0)
        codes = (codes * rows.sign().nan_to_num(0.0)).to(torch.int8)
        return {"norms": norms, "codes": codes.view(-1)[: gradient.numel()]}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        rows = _blocks(payload["codes"], self.block) * (payload["norms"] / self.levels)[:, None]
        return rows.view(-1)[: like.numel()].to(like.dtype)


@register_scheme("terngrad")
@dataclass(frozen=True)
class TernGrad(Codec):
    """Sends -1, 0 or 1 times each block's largest magnitude, at random: unbiased, without memory.

    For reference: an entry is sent with probability |x| / max, so most of the result is noise: 1.6
    times the squared norm of a gradient of normal entries. Variance: exactly
    |x|_max |x|_1 / |x|^2 - 1, at most (sqrt(block) - 1) / 2. Payload: 2 bits per entry, 32 per
    block.

    Args:
        block: entries per scale, a multiple of 4.

    Reference: Wen et al., TernGrad, 2017 (without its clipping, which is a bias).
    """

    block: int = 512

    def __post_init__(self) -> None:
        _check_block(self, self.block)
        if self.block % 4:
            raise ValueError(f"TernGrad(block=...) is a multiple of 4, got {self.block}")

    @property
    def traits(self) -> Traits:
        return Traits(error=Unbiased((math.sqrt(self.block) - 1) / 2))

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        rows = _blocks(gradient, self.block)
        scale = rows.abs().amax(1)
        safe = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
        sent = _uniform(rows.shape, bucket, "terngrad", rows) < rows.abs() / safe[:, None]
        codes = torch.where(sent, torch.where(rows < 0, 2, 1), 0).to(torch.uint8)
        # Four codes of 2 bits per byte; bits do not overlap, so their sum is their union.
        packed = (codes.view(-1, 4) << _SHIFTS.to(codes.device)).sum(1)
        return {"scale": scale, "codes": packed.to(torch.uint8)}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        codes = payload["codes"][:, None] >> _SHIFTS.to(like.device) & 3
        signs = (codes & 1).to(torch.float32) - (codes >> 1).to(torch.float32)
        rows = signs.view(-1, self.block) * payload["scale"][:, None]
        return rows.view(-1)[: like.numel()].to(like.dtype)


_SHIFTS = 2 * torch.arange(4, dtype=torch.uint8, device="cpu")
