"""Inputs on which kernels are compared: sizes at the edges, and numbers that break arithmetic."""

from __future__ import annotations

import random

import torch
from torch import Tensor

SIZES = (0, 1, 31, 33, 256, 257, 2049, 5000)
LARGE = (2**20 - 1, 2**20 + 1)
CPP = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
DTYPES = tuple(CPP)

_SPECIAL = {
    "nan": [float("nan")],
    "inf": [float("inf"), -float("inf")],
    "denormal": [1e-40, -1e-45],
    "zero": [0.0, -0.0],
    "huge": [3e38, -3.4e38],
    "half's": [65519.0, 65520.0, 6.1e-5, 5.9e-8],
}


def plain(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Heavy-tailed numbers of all signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp()
    return x.to(dtype)


def tricky(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Plain numbers; stretches of zeros, of denormals, of tiny ones; one special number per 97."""
    x = plain(n, seed=seed)
    x[n // 8 : n // 4] *= 1e-38
    x[n // 4 : n // 3] = 0.0
    x[n // 3 : n // 2] *= 1e-7
    specials = [number for numbers in _SPECIAL.values() for number in numbers]
    for i, at in enumerate(range(n // 2, n, 97)):
        x[at] = specials[i % len(specials)]
    return x.to(dtype)


def unaligned(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers that begin in the middle of a cache line."""
    return tricky(n + 3, dtype, seed)[3:]


def random_entries(rng: random.Random) -> Tensor:
    """Numbers of any size and dtype that begin at an odd place; few are not finite."""
    x = torch.randn(rng.choice([0, 1, rng.randrange(300), rng.randrange(9000)]) + 1)
    x = (x * 10.0 ** rng.randrange(-44, 38)).to(rng.choice(DTYPES))[1:]
    if len(x) and rng.random() < 0.3:
        x[rng.randrange(len(x))] = rng.choice([float("nan"), float("inf")])
    return x


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but for the payload of NaN."""
    if a.is_floating_point():
        nans = a.isnan()
        if not torch.equal(nans, b.isnan()):
            return False
        a, b = a.masked_fill(nans, 0), b.masked_fill(nans, 0)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(bits), b.view(bits)
    return torch.equal(a, b)


def cut(n: int) -> list[int]:
    """Lengths of segments: long and short ones, one that ends in 16 bits, empty ones."""
    sizes, rest = [], n
    for part in (n // 3, 7, 0, 256, n // 7, 130):
        sizes.append(min(part, rest))
        rest -= sizes[-1]
    return [*sizes, rest]


def cut_rows(n: int) -> list[list[int]]:
    """The same in six rows, which differ in length, and of which one is empty."""
    lengths = [n // 4, n // 3, 0, n // 8, 1 if n > 7 else 0]
    return [cut(length) for length in (*lengths, n - sum(lengths))]
