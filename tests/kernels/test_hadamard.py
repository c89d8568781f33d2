"""The randomised Hadamard transform: all implementations agree, and it is one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from commhooks.kernels import Segments, hadamard, philox, segments_for
from commhooks.kernels.hadamard import BLOCKS, hadamard_op
from tests.kernels.inputs import cut, cut_rows, plain, tricky
from tests.kernels.machines import assert_agree, machines

KERNELS = {"hadamard.cu": [f"hadamard<{block}>" for block in BLOCKS]}
KEY = (torch.tensor(3), 2**40 + 17, 2, 4096)


def outputs(
    run: Any, x: torch.Tensor, block: int, segments: Segments | None, row: int
) -> list[torch.Tensor]:
    """The transform and its inverse, written and added, of blocks or of segments."""
    slots = len(x)
    if segments is not None:
        slots = segments.slots * (len(segments.rows) if row < 0 else 1)
    table = None if segments is None else segments.table
    turned, back = torch.full((slots,), 7.0), torch.full_like(x, 7.0)
    added = tricky(len(x))
    run(hadamard_op, x, turned, block, False, *KEY, table, row, False)
    run(hadamard_op, turned, back, block, True, *KEY, table, row, False)
    run(hadamard_op, turned, added, block, True, *KEY, table, row, True)
    return [turned, back, added]


@pytest.mark.parametrize("block", BLOCKS)
def test_kernels_equal_the_definition(block):
    tried = machines(orders=(31, 5))
    for blocks in (0, 1, 3, 9000 // block):
        assert_agree(KERNELS, outputs, tricky(blocks * block), block, None, -1, on_machines=tried)
    for n, parts in itertools.product((1, 2000, 9001), (lambda n: [cut(n)], cut_rows)):
        segments = segments_for("int8", block, parts(n), whole=True)
        for row in (-1, len(segments.rows) // 2):
            begin, end = segments.row(row)
            x = tricky(end - begin)
            assert_agree(KERNELS, outputs, x, block, segments, row, on_machines=tried)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_inverse_undoes_it(block):
    x, out = plain(4096), torch.empty(4096)
    stream = philox.RandomBits(1, torch.tensor(2))
    hadamard(x, out, block, stream)
    torch.testing.assert_close(out.norm(), x.norm())
    hadamard(out, out, block, stream, inverse=True)
    torch.testing.assert_close(out, x, atol=1e-4, rtol=1e-5)


def test_signs_are_even_and_belong_to_places():
    signs = philox.signs(2**16, 1, 2, 3)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert signs.mean().abs() < 4 / 2**8
    assert torch.equal(signs[4096:], philox.signs(2**16 - 4096, 1, 2, 3, first=4096))


def fuzz(run: Any, rng: random.Random) -> None:
    block = rng.choice(BLOCKS)
    x = torch.randn(block * rng.randrange(6))
    key = (torch.tensor(rng.randrange(2**40)), rng.randrange(2**63), 1, 4096 * rng.randrange(5))
    inverse = rng.random() < 0.5
    run(hadamard_op, x, torch.zeros_like(x), block, inverse, *key, None, -1, inverse)
    n = rng.randrange(5000)
    segments = segments_for("int8", block, rng.choice([[cut(n)], cut_rows(n)]), whole=True)
    slots = torch.randn(segments.slots * len(segments.rows))
    inverse, entries = rng.random() < 0.5, torch.randn(n)
    pair = (slots, entries) if inverse else (entries, slots)
    run(hadamard_op, *pair, block, inverse, *key, segments.table, -1, False)
