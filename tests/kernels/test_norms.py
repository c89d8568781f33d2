"""Levels of norms: all implementations agree, and rounding is unbiased."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from commhooks.kernels import RandomBits, dequantize, payload_bytes, quantize_norms, segments_for
from commhooks.kernels.norms import quantize_norms_op
from tests.kernels.inputs import CPP, DTYPES, SIZES, plain, tricky, unaligned
from tests.kernels.machines import assert_agree

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
KERNELS = {"norms.cu": [f"quantize_norms<{t}, {b}>" for t in CPP.values() for b in BLOCKS]}
KEYS = ((torch.tensor(5), 2**50 + 3, 1, 512), (torch.tensor(0), -7, 0, 0))


def size_of(n: int, block: int) -> int:
    return payload_bytes(segments_for("int8", block, [[n]], whole=True), "int8", block)


def outputs(run: Any, x: torch.Tensor, block: int, levels: int, key: Any) -> list[torch.Tensor]:
    payload = torch.full((size_of(x.numel(), block),), 77, dtype=torch.uint8)
    run(quantize_norms_op, x, payload, block, levels, *key)
    return [payload]


def test_kernels_equal_the_definition():
    makes = itertools.cycle((tricky, unaligned, plain, tricky))  # no dtype has one kind alone
    for number, (n, dtype) in enumerate(itertools.product(SIZES, DTYPES)):
        x, key = next(makes)(n, dtype), KEYS[number % 2]
        for block, levels in zip(BLOCKS, (127, 1, 64, 127, 3, 127, 127), strict=True):
            assert_agree(KERNELS, outputs, x, block, levels, key)


def decoded(x: torch.Tensor, block: int, levels: int, step: int = 1) -> torch.Tensor:
    payload, out = torch.empty(size_of(x.numel(), block)).byte(), torch.empty_like(x)
    quantize_norms(x, payload, block, levels, RandomBits(3, torch.tensor(step)))
    segments = segments_for("int8", block, [[x.numel()]], whole=True)
    dequantize(payload[None], out, "int8", block, segments=segments)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_entries_are_a_level_off_at_most_and_right_on_average(size):
    x, draws, levels = plain(1024) * size, 2000, 5
    level = (x / size).view(4, 256).norm(dim=1).repeat_interleave(256) / levels
    mean = torch.zeros(1024, dtype=torch.float64)
    for step in range(draws):
        out = decoded(x, 256, levels, step).double() / size
        assert ((out - x / size).abs() <= level * 1.0001).all()
        mean += out / draws
    assert ((mean - x / size).abs() < 5 * level / 2 / draws**0.5).all()


def test_what_is_not_finite_spoils_its_own_block():
    x = plain(5 * 32)
    x[40], x[70] = float("nan"), float("-inf")
    out = decoded(x, 32, 127).view(5, 32)
    assert out[[1, 2]].isnan().all()
    assert out[[0, 3, 4]].isfinite().all()


def fuzz(run: Any, rng: random.Random) -> None:
    x = torch.randn(rng.choice([0, 1, rng.randrange(300), rng.randrange(9000)]) + 1)
    x = (x * 10.0 ** rng.randrange(-44, 38)).to(rng.choice(DTYPES))[1:]
    if len(x) and rng.random() < 0.3:
        x[rng.randrange(len(x))] = rng.choice([float("nan"), float("inf")])
    outputs(run, x, rng.choice(BLOCKS), rng.randrange(1, 128), rng.choice(KEYS))
