"""Defines top-k, which sends the largest entries of a bucket."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._packed import PackedCodec, Pattern, Piece, Randomness
from commhooks.core._registry import register_scheme
from commhooks.core._traits import INT32_PLACES, Biased, ErrorKind, Traits
from commhooks.core._user_line import user_stacklevel
from commhooks.kernels import scatter_sum, top_k, top_k_sampled
from commhooks.schemes._ratio import check_ratio, log_delay, number_kept

__all__ = ["TopK"]


@register_scheme("topk")
@dataclass(frozen=True)
class TopK(PackedCodec):
    """Sends the entries of largest magnitude of a bucket with their indices; ranks add them up.

    Payload: 8 bytes per sent entry, gathered from every rank, which is less than an all-reduce
    below a ratio of about 1 / ranks. NaN counts as largest, and is sent.

    Biased: use with ``ErrorFeedback``; the kernel adds and keeps the residual in the same pass.

    Args:
        ratio: share of the entries that is sent; at least one entry is.
        sampled: finds the threshold from a sample of the bucket: sends at most as many entries,
            usually somewhat fewer.
        pattern: "all_gather", or "two_phase": each rank sums a shard and sends the largest entries
            of the sum, so that bytes do not grow with the number of ranks and the mean has no more
            entries than ``ratio``.

    Example:
        >>> hook = register(ddp_model, "topk", ratio=0.01)

    Reference: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017.
    """

    ratio: float = 0.01
    sampled: bool = False
    pattern: Pattern = "all_gather"
    keeps_zeros = True

    @property
    def error(self) -> ErrorKind:
        return Biased()

    @property
    def traits(self) -> Traits:
        return super().traits._replace(max_bucket_numel=INT32_PLACES)

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)

    def advise(self) -> None:
        if self.ratio >= 0.5:  # 8 bytes of every second entry are the 4 bytes of each
            warnings.warn(
                f"TopK(ratio={self.ratio:g}) would send more than an uncompressed average of "
                f"float32, so that gradients are averaged uncompressed. The ratio is a share of "
                f"the entries: ratio=0.01 is 1 %",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        else:
            log_delay(self, self.ratio)

    def is_worthwhile(self, n: int, dense_bytes: int, world_size: int) -> bool:
        # Payloads received, against the two buckets that an all-reduce sends and receives.
        received = world_size if self.pattern == "all_gather" else 2
        return received * self.payload_bytes(n) < 2 * dense_bytes

    def payload_bytes(self, n: int) -> int:
        return -(-8 * number_kept(self.ratio, n) // 16) * 16

    def pack(self, piece: Piece, payload: Tensor, random: Randomness) -> None:
        x, residual, unsent = piece
        k = number_kept(self.ratio, x.numel())
        # The values include the padding of the payload, which the kernel sets to zero.
        indices, values = payload[: 4 * k].view(torch.int32), payload[4 * k :].view(torch.float32)
        select = top_k_sampled if self.sampled else top_k
        # The kernel takes a residual only together with a tensor for what is not sent.
        if residual is not None and unsent is None:
            x, residual = x + residual, None
        select(x, k, indices, values, residual=residual, unsent=unsent)

    def unpack(self, payloads: Tensor, out: Tensor, random: Randomness, factor: float) -> Tensor:
        k = number_kept(self.ratio, out.numel())
        indices = payloads[:, : 4 * k].view(torch.int32)
        values = payloads[:, 4 * k : 8 * k].view(torch.float32)
        finite = torch.empty((), dtype=torch.bool, device=out.device)
        scatter_sum(indices, values, out, factor=factor, finite=finite)
        return finite
