"""What the low-rank schemes share: settings, right factors to start from, finiteness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from commhooks._memory import Layout, Memory
from commhooks._scheme import Context, Scheme
from commhooks.kernels import all_finite

__all__ = [
    "check_flag",
    "check_rank",
    "compute_dtype",
    "draw",
    "fits",
    "fresh_factors",
    "poison",
    "random_factors",
]


def check_rank(scheme: Scheme, rank: object) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        name = type(scheme).__name__
        raise ValueError(f"{name}(rank=...) is a whole number, 1 or more, got {rank!r}")


def check_flag(scheme: Scheme, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{type(scheme).__name__}({name}=...) is True or False, got {value!r}")


def compute_dtype(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def draw(name: str, shape: Sequence[int], ctx: Context, step: int) -> Tensor:
    """N(0, 1), the same on every rank and in every bucket layout."""
    generator = ctx.generator(f"{name}/q", shared=True, step=step)
    return torch.randn(tuple(shape), generator=generator)


def random_factors(factors: Layout, ctx: Context, step: int, like: Tensor) -> Tensor:
    """Random factors of all parameters, flat, with rows of about norm 1."""
    drawn = [
        draw(name, shape, ctx, step).div_(math.sqrt(shape[1])).view(-1)
        for name, shape in zip(factors.names, factors.shapes, strict=True)
    ]
    return torch.cat(drawn).to(like)


@lru_cache(maxsize=256)
def fresh_factors(factors: Layout, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What dead rows are replaced by: random, the same on every rank, the same every time."""
    like = torch.empty(0, device=device, dtype=dtype)
    return random_factors(factors, Context(Memory(), like, seed=seed), 0, like)


def poison(finite: Tensor) -> Tensor:
    """0 if finite, else NaN: added to a factor, it makes every entry of the product NaN."""
    return torch.where(finite, 0.0, float("nan"))


def fits(output: Tensor) -> Tensor | bool:
    """Whether a finite mean stayed finite in the gradient's own dtype."""
    return all_finite(output) if output.dtype == torch.float16 else True
