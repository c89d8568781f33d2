"""Nearest levels: all implementations agree, and scales make the projection right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commhooks.kernels import dequantize_levels, levels, quantize_levels
from tests.kernels.inputs import plain, tricky
from tests.kernels.machines import assert_agree

NAMES = ("quantize_levels", "dequantize_levels")
KERNELS = {"levels.cu": [f"{name}<{bits}>" for name in NAMES for bits in (1, 2, 3, 4)]}
BLOCKS = (128, 256, 512, 1024, 2048)


def some_levels(bits: int) -> torch.Tensor:
    return torch.linspace(-2.1, 2.3, 2**bits)


def outputs(run: Any, x: torch.Tensor, bits: int, block: int, *, left: bool) -> list[torch.Tensor]:
    n, table = x.numel(), levels._table(some_levels(bits))
    shard = -(-n // (2 * block)) * block if left else n  # two rows, or one
    payloads = torch.full((3, 2, levels.level_bytes(shard, bits, block)), 9, dtype=torch.uint8)
    rest = torch.full((n,), 7.0) if left else None
    for scale, payload in zip((1.0, -3.0, 0.3), payloads, strict=True):
        run(levels.quantize_levels_op, x * scale, table, payload, rest, block, shard)
    written, added = torch.full((2, n), 5.0)
    run(levels.dequantize_levels_op, payloads[:1], table, written, block, shard, 1.0)
    run(levels.dequantize_levels_op, payloads, table, added, block, shard, 1 / 3)
    return [payloads, written, added, *([] if rest is None else [rest])]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_kernels_equal_the_definition(bits):
    for block in BLOCKS:
        for blocks, make in ((0, plain), (1, tricky), (5, tricky), (4, plain)):
            for left in (False, True):
                x = make(blocks * block, torch.float32)
                assert_agree(KERNELS, outputs, x, bits, block, left=left)


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_the_nearest_level_is_taken_and_the_projection_is_right(size):
    x, values = plain(4096) * size, some_levels(3)
    payload, out = torch.zeros(1, levels.level_bytes(4096, 3, 1024)).byte(), torch.empty(4096)
    left = torch.empty(4096)
    quantize_levels(x, values, payload[0], 1024, unsent=left)
    dequantize_levels(payload, values, out, 1024)
    scales = payload[0, :16].view(torch.float32)
    rows, actual = (x / size).view(4, 1024).double(), (out / size).view(4, 1024).double()
    units = rows / rows.square().mean(1, keepdim=True).sqrt()
    nearest = values[(units[..., None] - values).abs().argmin(-1)]
    torch.testing.assert_close(
        actual / (scales / size)[:, None], nearest.double(), rtol=1e-5, atol=0
    )
    torch.testing.assert_close((actual * rows).sum(1), rows.square().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(left, x - out)


def test_what_is_not_finite_spoils_its_own_block():
    x = plain(5 * 128)
    x[130], x[300] = float("nan"), float("-inf")
    payload, out = torch.zeros(1, levels.level_bytes(640, 1, 128)).byte(), torch.empty(5 * 128)
    quantize_levels(x, some_levels(1), payload[0], 128, unsent=None)
    dequantize_levels(payload, some_levels(1), out, 128)
    assert out.view(5, 128)[1:3].isnan().all()
    assert out.view(5, 128)[[0, 3, 4]].isfinite().all()


def fuzz(run: Any, rng: random.Random) -> None:
    block = rng.choice(BLOCKS)
    x = torch.randn(rng.randrange(4) * block) * 10.0 ** rng.randrange(-44, 38)
    if len(x) and rng.random() < 0.3:
        x[rng.randrange(len(x))] = rng.choice([float("nan"), float("inf")])
    outputs(run, x, rng.choice((1, 2, 3, 4)), block, left=rng.random() < 0.5)
