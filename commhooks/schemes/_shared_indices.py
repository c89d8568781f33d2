"""Defines ``SharedIndices``, a base of schemes whose ranks send entries at the same indices."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange, nan_unless
from commhooks.core._scheme import Scheme
from commhooks.core._traits import INT32_PLACES, Biased, Traits
from commhooks.kernels import all_finite
from commhooks.schemes._ratio import check_ratio
from ddp_core import AllReduce, Collective

__all__ = ["IndexExchange", "SharedIndices", "spoil_unless"]

IndexExchange = Generator[
    Collective, Tensor, Any
]  # returns indices, see ``SharedIndices.choose_indices``


@dataclass(frozen=True)
class SharedIndices(Scheme):
    """Sends entries at indices that every rank knows: values only, in one all-reduce.

    If any value of any rank is not finite, sent or not, the whole bucket arrives as NaN.
    """

    ratio: float = 0.01

    traits = Traits(error=Biased(), max_bucket_numel=INT32_PLACES, keeps_zeros=True)

    def __post_init__(self) -> None:
        check_ratio(self, self.ratio)

    def choose_indices(self, bucket: Bucket) -> IndexExchange:
        """Returns indices that are the same on all ranks, by a collective or by shared random bits.

        Subclasses choose their form: ``gather`` and ``scatter`` get what this method returns.
        """
        raise NotImplementedError
        yield  # makes this a generator function

    def gather(self, bucket: Bucket, indices: Any) -> Tensor:
        """Returns the gradient's entries at ``indices``; writes others to ``bucket.unsent``.

        At least one of the values is NaN unless all entries are finite, also those that are not
        sent: so the sum of the values shows it to the other ranks.
        """
        raise NotImplementedError

    def scatter(
        self, values: Tensor, out: Tensor, indices: Any, finite: Tensor | None = None
    ) -> None:
        """Writes values to ``out`` at ``indices``, and zeros elsewhere; NaN unless ``finite``."""
        raise NotImplementedError

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if not bucket.raw.numel():
            return (yield from bucket.all_reduce())
        unsent = bucket.unsent
        indices = yield from self.choose_indices(bucket)
        values = self.gather(bucket, indices)
        own_values = values if unsent is None else values.clone()
        request = AllReduce(values)
        values = yield request
        if unsent is not None and request.sent is not None:  # rounded on the way
            error = torch.empty_like(unsent)
            self.scatter(own_values - request.sent, error, indices)
            unsent.add_(error)
        finite = all_finite(values)
        self.scatter(values, bucket.output, indices, finite)
        return Result(bucket.output, unsent=unsent, finite=finite)


def spoil_unless(finite: Tensor | None, out: Tensor) -> None:
    """Makes all entries NaN unless ``finite``."""
    # Reading the flag is free on a CPU only; on a GPU it would wait for the device.
    if finite is not None and (finite.device.type != "cpu" or not finite):
        out.add_(nan_unless(finite))
