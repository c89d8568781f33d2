"""Defines ``Result``, the return value of a scheme's exchange."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from torch import Tensor

from ddp_core import Collective

__all__ = ["Result", "SchemeExchange"]


class Result(NamedTuple):
    """Holds the result of one exchange of a bucket on one rank.

    Attributes:
        mean: flat averaged gradient; the same bits on every rank unless ``traits.agrees`` is False.
            With ``bucket.shards`` the mean of this rank's shard.
        sent: flat tensor that this rank's contribution decodes to; the mean of ``sent`` over ranks
            is ``mean``. None: ``gradient - unsent``, or the whole gradient where that is None, too.
        unsent: flat, ``gradient - sent``; None where the scheme leaves the subtraction to
            :meth:`Bucket.completed`.
        finite: one bool, whether the bucket is finite on all ranks; the same on every rank. None:
            the scheme did not check.
    """

    mean: Tensor
    sent: Tensor | None = None
    unsent: Tensor | None = None
    finite: Tensor | None = None


SchemeExchange = Generator[Collective, Tensor, Result]
