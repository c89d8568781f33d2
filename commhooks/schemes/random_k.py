"""Defines random-k, which sends entries at random indices that all ranks know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, nan_unless
from commhooks.core._registry import register_scheme
from commhooks.kernels import RandomBits, all_finite, gather_random, random_places, scatter_random
from commhooks.schemes._ratio import log_delay, number_kept
from commhooks.schemes._shared_indices import IndexExchange, SharedIndices, spoil_unless

__all__ = ["RandomK"]


@register_scheme("random_k")
@dataclass(frozen=True)
class RandomK(SharedIndices):
    """Sends random entries of a bucket; all ranks draw the same ones, so no indices are sent.

    The bucket is cut into k equal stretches, and one entry of each is sent. Biased: use with
    ``ErrorFeedback``, which sends the others in later steps. Payload: 4 bytes per sent entry.

    Args:
        ratio: share of the entries that is sent; at least one entry is.

    Reference: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018.
    """

    def advise(self) -> None:
        log_delay(self, self.ratio)

    def choose_indices(self, bucket: Bucket) -> IndexExchange:
        return bucket.random("random_k", shared=True), bucket.step
        yield

    def gather(self, bucket: Bucket, indices: tuple[RandomBits, int]) -> Tensor:
        x, unsent = bucket.raw, bucket.unsent
        k = number_kept(self.ratio, x.numel())
        if x.dtype == torch.float64:  # which the kernel does not know
            at = _random_indices(x.numel(), k, *indices, x.device)
            finite = all_finite(bucket.gradient)
            return _gather_at(at, bucket.gradient, unsent).add_(nan_unless(finite))
        values = x.new_empty(k, dtype=torch.float32)
        gather_random(x, values, indices[0], residual=bucket.residual, unsent=unsent)
        return values

    def scatter(
        self,
        values: Tensor,
        out: Tensor,
        indices: tuple[RandomBits, int],
        finite: Tensor | None = None,
    ) -> None:
        if out.dtype == torch.float64:
            at = _random_indices(out.numel(), values.numel(), *indices, out.device)
            out.zero_().index_copy_(0, at, values)
            spoil_unless(finite, out)
        else:
            scatter_random(values, out, indices[0], finite=finite)


def _random_indices(n: int, k: int, stream: RandomBits, step: int, device: torch.device) -> Tensor:
    return random_places(n, k, step, stream.seed, stream.number, device=device)


def _gather_at(indices: Tensor, x: Tensor, unsent: Tensor | None) -> Tensor:
    values = x[indices]
    if unsent is not None:
        unsent.copy_(x).index_fill_(0, indices, 0.0)
    return values
