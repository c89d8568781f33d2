"""Defines signSGD with a majority vote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core.packed import PackedCodec, Pattern, Piece, Randomness
from commhooks.core.registry import register_scheme
from commhooks.core.traits import Biased, ErrorKind, Traits
from commhooks.kernels import all_finite, pack_bits, unpack_bits

__all__ = ["SignSGD"]


@register_scheme("signsgd")
@dataclass(frozen=True)
class SignSGD(PackedCodec):
    """Sends signs and returns the sign that most ranks sent, times ``scale``; a tie is positive.

    For reference: does not converge where the ranks' gradients differ much or are dominated by few
    large entries, needs a learning rate for signs, and has no error to feed back. Prefer
    ``onebit``.

    Args:
        scale: magnitude of each entry of the result.
        pattern: "two_phase" or "all_gather".

    Example:
        >>> hook = register(ddp_model, "signsgd")

    Reference: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018.
    """

    scale: float = 1.0
    pattern: Pattern = "two_phase"

    @property
    def error(self) -> ErrorKind:
        return Biased()

    @property
    def traits(self) -> Traits:
        return super().traits._replace(returns="update")

    granularity = 8

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"SignSGD(scale=...) is above 0, got {self.scale!r}")

    def payload_bytes(self, n: int) -> int:
        return -(-(-(-n // 8) + 1) // 16) * 16  # the last byte: whether all are finite

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        x = piece.x  # signs are an update, around which there is no feedback
        nbytes = -(-x.numel() // 8)
        payload[nbytes:].zero_()  # padding travels, too: the same bytes in every run
        pack_bits(x >= 0, payload[:nbytes])
        payload[-1] = ~all_finite(x)

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> None:
        n = out.numel()
        votes = torch.zeros(n, dtype=torch.float32, device=out.device)
        bits = torch.empty(n, dtype=torch.bool, device=out.device)
        for row in payloads:
            unpack_bits(row[: -(-n // 8)].contiguous(), bits)
            votes += bits
        # At least half of the ranks: a tie is positive everywhere.
        votes = torch.where(2 * votes >= len(payloads), self.scale, -self.scale)
        out.copy_(votes.masked_fill_((payloads[:, -1] != 0).any(), torch.nan))
