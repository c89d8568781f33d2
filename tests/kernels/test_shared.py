"""Integers of a shared scale: all implementations agree, and sums of codes are codes of the sum."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from commhooks.kernels import dequantize_shared, largest_magnitudes, philox, quantize_shared
from commhooks.kernels.shared import dequantize_shared_op, magnitudes_op, quantize_shared_op
from tests.kernels.inputs import CPP, DTYPES, LARGE, SIZES, plain, random_entries, tricky, unaligned
from tests.kernels.machines import assert_agree, machines

NAMES = ("largest_magnitudes", "quantize_shared", "dequantize_shared")
KERNELS = {"shared.cu": [f"{name}<{t}>" for name in NAMES for t in CPP.values()]}
KEYS = (philox.NO_STREAM, (torch.tensor(5), 2**50 + 3, 1, 512))


def outputs(run: Any, x: torch.Tensor, block: int, levels: int, key: Any) -> list[torch.Tensor]:
    n = x.numel()
    residual = plain(n, seed=3) if levels != 127 else None
    largest = torch.full((-(-n // block),), 2**31 - 1, dtype=torch.int32)
    codes, left = torch.full((n,), 7, dtype=torch.int8), torch.full((n,), 7.0)
    run(magnitudes_op, x, residual, largest, block)
    run(quantize_shared_op, x, residual, largest, codes, left, block, levels, *key)
    out = torch.full((n,), 7.0).to(x.dtype)
    run(dequantize_shared_op, codes, largest, out, block, levels, 1 / 3)
    # Another rank's magnitude: what lies beyond is clipped.
    smaller, clipped = (largest - (1 << 24)).clamp(min=0), torch.empty_like(codes)
    run(quantize_shared_op, x, residual, smaller, clipped, None, block, levels, *key)
    return [largest, codes, left, out, clipped]


def test_kernels_equal_the_definition():
    makes = itertools.cycle((tricky, unaligned, plain, plain))
    for n, dtype in itertools.product((*SIZES, *LARGE), DTYPES):
        if n > 10_000 and dtype != torch.float32:
            continue
        for block, levels, key in ((256, 127, KEYS[0]), (1024, 42, KEYS[1]), (2**40, 1, KEYS[1])):
            x, tried = next(makes)(n, dtype), machines(orders=(0, 5) if n < 10_000 else ())
            assert_agree(KERNELS, outputs, x, block, levels, key, on_machines=tried)


def test_what_is_not_finite_spoils_its_own_block():
    x = plain(1024)
    x[300], x[700] = float("nan"), float("-inf")
    largest, codes, out = torch.empty(4, dtype=torch.int32), torch.empty(1024).char(), x.clone()
    largest_magnitudes(x, largest, 256)
    quantize_shared(x, largest, codes, 256, 127)
    dequantize_shared(codes, largest, out, 256, 127)
    assert out.view(4, 256)[1:3].isnan().all()
    assert out.view(4, 256)[[0, 3]].isfinite().all()


def fuzz(run: Any, rng: random.Random) -> None:
    block = rng.choice([256 * rng.randrange(1, 20), 2**31])
    outputs(run, random_entries(rng), block, rng.randrange(1, 128), rng.choice(KEYS))
