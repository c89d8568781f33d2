"""Affine levels: all implementations agree, and they are what they say they are."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

from commhooks.kernels import affine, dequantize_affine, quantize_affine
from commhooks.kernels.affine import dequantize_affine_op, quantize_affine_op
from tests.kernels.inputs import CPP, DTYPES, LARGE, SIZES, plain, random_entries, tricky, unaligned
from tests.kernels.machines import assert_agree, machines

NAMES = ("affine_extents", "affine_levels", "affine_entries")
KERNELS = {
    "affine.cu": [
        *(f"{n}<{t}>" for n in NAMES for t in CPP.values()),
        *(f"affine_blocks<{t}, {rows}>" for t in CPP.values() for rows in (8, 16, 32)),
        *("affine_scales<1>", "affine_scales<8>"),
    ]
}
BLOCKS = (1, 33, 250, 512, 1000, 1500, 2**32, 2**63 - 1)


def outputs(run: Any, x: torch.Tensor, block: int) -> list[torch.Tensor]:
    n = x.numel()
    blocks = -(-n // block)
    levels = torch.full((n,), 7, dtype=torch.uint8)
    scale, zero = torch.full((blocks,), 7.0), torch.full((blocks,), 7, dtype=torch.uint8)
    run(quantize_affine_op, x, levels, scale, zero, block)
    written, added = torch.full((n,), 5.0).to(x.dtype), plain(n).to(x.dtype)
    run(dequantize_affine_op, levels, scale, zero, block, 1 / 3, False, written)
    run(dequantize_affine_op, levels, scale, zero, block, -0.5, True, added)
    return [levels, scale, zero, written, added]


def test_kernels_equal_the_definition():
    makes = itertools.cycle((tricky, unaligned, plain))  # of eight blocks: each has all in turn
    for n, dtype in itertools.product((*SIZES, *LARGE), DTYPES):
        if n > 10_000 and dtype != torch.float32:
            continue
        for block in BLOCKS if n < 10_000 else BLOCKS[3:]:
            x, tried = next(makes)(n, dtype), machines(orders=() if n >= 10_000 else (0, 5))
            assert_agree(KERNELS, outputs, x, block, on_machines=tried)


def test_the_range_of_a_long_block_is_found_by_many_warps(monkeypatch):
    monkeypatch.setattr(affine, "_CHUNK", 16)  # as many chunks as a large bucket has
    for make, block in ((tricky, 2**40), (plain, 1500), (tricky, 1100)):
        assert_agree(KERNELS, outputs, make(9000, torch.float32), block)


def decoded(x: torch.Tensor, block: int) -> torch.Tensor:
    blocks, out = -(-x.numel() // block), torch.empty_like(x)
    levels, scale = torch.empty(x.numel(), dtype=torch.uint8), torch.empty(blocks)
    zero = torch.empty(blocks, dtype=torch.uint8)
    quantize_affine(x, levels, scale, zero, block)
    dequantize_affine(levels, scale, zero, block, out)
    return out


def test_entries_are_off_by_half_a_level_at_most():
    x = plain(512 * 20) + 0.5
    rows, actual = x.view(-1, 512), decoded(x, 512).view(-1, 512)
    level = (rows.amax(1).clamp(min=0) - rows.amin(1).clamp(max=0)) / 255
    # The level of zero is rounded: what it pushes over an end loses up to half a level more.
    assert ((rows - actual).abs() <= level[:, None] * 1.001).all()
    assert ((rows - actual).abs() <= level[:, None] * 0.501).float().mean() > 0.95
    assert torch.equal(decoded(torch.zeros(100), 32), torch.zeros(100))


def test_what_is_not_finite_spoils_its_own_block():
    x = plain(5 * 32)
    x[40], x[70] = float("nan"), float("-inf")
    actual = decoded(x, 32).view(5, 32)
    assert actual[[1, 2]].isnan().all()
    assert actual[[0, 3, 4]].isfinite().all()


def fuzz(run: Any, rng: random.Random) -> None:
    outputs(run, random_entries(rng), rng.choice([rng.randrange(1, 3000), 2**31]))
