"""Casts: all implementations agree; stochastic rounding is unbiased and hits neighbours only."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from commhooks.kernels import cast, philox, scaled_cast
from tests.kernels.inputs import CPP, DTYPES, SIZES, plain, tricky, unaligned
from tests.kernels.machines import ORDERS, assert_agree, machines

KERNELS = {"cast.cu": [f"cast<{a}, {b}>" for a in CPP.values() for b in CPP.values()]}
NARROW = (torch.float16, torch.bfloat16)


def outputs(run: Any, x: torch.Tensor, narrow: torch.dtype, scale: float) -> list[torch.Tensor]:
    keys = [philox.NO_STREAM]
    if x.dtype == torch.float32 and narrow in NARROW:
        keys.append((torch.tensor(5), 2**50 + 3, 1, 256))
    results = [torch.empty(len(x), dtype=narrow) for _ in keys]
    for out, key in zip(results, keys, strict=True):
        run(cast.cast_op, x, out, scale, *key)
    return results


def test_kernels_equal_the_definition():
    tried = machines(orders=ORDERS)
    for wide, narrow, n, scale in itertools.product(DTYPES, DTYPES, SIZES, (1.0, 1 / 3)):
        x = (unaligned if n % 2 else tricky)(n, wide)
        assert_agree(KERNELS, outputs, x, narrow, scale, on_machines=tried)


@pytest.mark.parametrize("narrow", NARROW)
def test_stochastic_rounding_is_unbiased(narrow):
    # Normal and denormal numbers of float16 among them.
    x = torch.cat([plain(256), plain(256, seed=1) * 2.0**-20])
    draws = 2000
    seen = torch.empty(draws, 512, dtype=narrow)
    for i in range(draws):
        scaled_cast(x, 1.0, seen[i], random=philox.RandomBits(1, torch.tensor(i)))
    # The neighbours: the nearest number, and the next one in magnitude on the other side.
    near = x.to(narrow)
    step = (x.abs() > near.float().abs()).to(torch.int16) * 2 - 1
    other = (near.view(torch.int16) + step).view(narrow)
    low = torch.minimum(near.float(), other.float())
    high = torch.maximum(near.float(), other.float())
    assert ((seen == near) | (seen == other)).all()
    share = ((x - low) / (high - low)).clamp(0, 1)
    often = torch.minimum(share, 1 - share) * draws > 20
    deviation = (high - low) * (share * (1 - share) / draws).sqrt()
    z = ((seen.float().mean(0) - x) / deviation)[often]
    assert len(z) > 300
    assert z.mean().abs() < 4 / len(z) ** 0.5
    assert z.abs().max() < 5


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 33, 2**17, 2**17 + 1])
def test_scales_then_narrows(
    numel: int, narrow: torch.dtype, wide: torch.dtype, scale: float
) -> None:
    x = torch.randn(numel, dtype=wide, generator=torch.Generator().manual_seed(numel)) * 1e5
    kept = x.clone()
    out = scaled_cast(x, scale, out=torch.empty(numel, dtype=narrow))
    assert torch.equal(out, (x * scale).to(narrow))
    assert torch.equal(x, kept)


def test_takes_any_shape() -> None:
    x = torch.arange(12.0).view(3, 4)
    out = scaled_cast(x, 0.25, out=torch.empty(3, 4, dtype=torch.bfloat16))
    assert torch.equal(out, (x * 0.25).bfloat16())


def fuzz(run: Any, rng: random.Random) -> None:
    n = rng.choice([0, 1, rng.randrange(300), rng.randrange(3000)])
    wide, narrow = rng.choice(DTYPES), rng.choice(DTYPES)
    stochastic = wide == torch.float32 and narrow in NARROW and rng.random() < 0.5
    step = torch.tensor(rng.randrange(2**40)) if stochastic else None
    x = (torch.randn(n + 1) * 10.0 ** rng.randrange(-44, 38)).to(wide)[rng.randrange(2) :][:n]
    out = torch.empty(n, dtype=narrow)
    run(cast.cast_op, x, out, 0.3, step, rng.randrange(2**63), 1, 256 * rng.randrange(9))
