"""What the low-rank schemes share: settings, right factors to start from, finiteness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from commhooks._bucket import Bucket
from commhooks._memory import Layout
from commhooks._scheme import Scheme
from commhooks.kernels import all_finite

__all__ = [
    "check_rank",
    "check_rate",
    "draw",
    "fits",
    "fresh_factors",
    "random_factors",
    "work_buffer",
]


def check_rank(scheme: Scheme, rank: int) -> None:
    if rank < 1:
        name = type(scheme).__name__
        raise ValueError(f"{name}(rank=...) is a whole number, 1 or more, got {rank!r}")


def check_rate(scheme: Scheme, rate: float) -> None:
    if rate < 0:
        raise ValueError(
            f"{type(scheme).__name__}(min_compression_rate=...) is a finite number, 0 or more "
            f"(0 compresses every matrix), got {rate!r}"
        )


def work_buffer(bucket: Bucket) -> Tensor:
    """Where the gradient with its residual goes.

    That is ``raw`` where that may be written over: the less memory, the faster.
    """
    if bucket.unsent is None:
        return bucket.raw
    alone = bucket.output.data_ptr() != bucket.raw.data_ptr()
    return bucket.unsent if alone or bucket.raw.dtype != bucket.wide_dtype else bucket.raw


def draw(name: str, shape: Sequence[int], bucket: Bucket, step: int) -> Tensor:
    """N(0, 1), the same on every rank and in every bucket layout."""
    generator = bucket.generator(f"{name}/q", shared=True, step=step)
    return torch.randn(tuple(shape), generator=generator)


def random_factors(factors: Layout, bucket: Bucket, step: int, like: Tensor) -> Tensor:
    """Random factors of all parameters, flat, with rows of about norm 1."""
    drawn = [
        draw(name, shape, bucket, step).div_(math.sqrt(shape[1])).view(-1)
        for name, shape in zip(factors.names, factors.shapes, strict=True)
    ]
    return torch.cat(drawn).to(like)


@lru_cache(maxsize=256)
def fresh_factors(factors: Layout, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What dead rows are replaced by: random, the same on every rank, the same every time."""
    like = torch.empty(0, device=device, dtype=dtype)
    return random_factors(factors, Bucket(like, factors, seed=seed), 0, like)


def fits(output: Tensor) -> Tensor | bool:
    """Whether a finite mean stayed finite in the gradient's own dtype."""
    return all_finite(output) if output.dtype == torch.float16 else True
