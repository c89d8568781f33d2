"""The randomised Hadamard transform: all implementations agree, and it is one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commhooks.kernels import hadamard, philox
from commhooks.kernels.hadamard import BLOCKS, hadamard_op
from tests.kernels.inputs import plain, same, tricky
from tests.kernels.machines import machines, on

KERNELS = {"hadamard.cu": [f"hadamard<{block}>" for block in BLOCKS]}
KEY = (torch.tensor(3), 2**40 + 17, 2, 4096)


def test_kernels_equal_the_definition():
    for machine in machines():
        with on(machine, KERNELS) as run:
            for block in BLOCKS:
                for blocks, rows in ((0, 1), (1, 1), (3, 2), (9000 // block, 3)):
                    for inverse in (False, True):
                        x, key = tricky(blocks * block), (*KEY, -(-blocks // rows) * block)
                        expected, got = torch.empty(2, blocks * block)
                        hadamard_op.definition(x, expected, block, inverse, *key)
                        run(hadamard_op, x, got, block, inverse, *key)
                        assert same(expected, got), (machine, block, blocks, inverse)


def matrix(block: int) -> torch.Tensor:
    """The Hadamard matrix over its norm, by its definition."""
    i = torch.arange(block)
    common = i[:, None] & i
    parity = sum((common >> bit & 1 for bit in range(11)), torch.zeros_like(common)) % 2
    return (1.0 - 2.0 * parity) / block**0.5


@pytest.mark.parametrize("block", [32, 512])
def test_it_is_the_product_with_a_hadamard_matrix(block):
    x, out = plain(4 * block), torch.empty(4 * block)
    stream = philox.RandomBits(1, torch.tensor(2))
    hadamard(x, out, block, stream)
    signs = philox.signs(4 * block, 2, 1, 0)
    expected = ((x * signs).view(4, block).double() @ matrix(block).double()).flatten()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_inverse_undoes_it(block):
    x, out = plain(4096), torch.empty(4096)
    stream = philox.RandomBits(1, torch.tensor(2))
    hadamard(x, out, block, stream)
    torch.testing.assert_close(out.norm(), x.norm())
    hadamard(out, out, block, stream, inverse=True)
    torch.testing.assert_close(out, x, atol=1e-4, rtol=1e-5)


def test_a_row_is_that_of_its_own_stream():
    x, out, alone = plain(3 * 4096), torch.empty(3 * 4096), torch.empty(4096)
    stream = philox.RandomBits(1, torch.tensor(2))
    hadamard(x, out, 512, stream, shard=4096)
    for row in range(3):
        hadamard(x[row * 4096 : (row + 1) * 4096], alone, 512, stream.row(row))
        assert torch.equal(out[row * 4096 : (row + 1) * 4096], alone)


def test_signs_are_even_and_belong_to_places():
    signs = philox.signs(2**16, 1, 2, 3)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert signs.mean().abs() < 4 / 2**8
    assert torch.equal(signs[4096:], philox.signs(2**16 - 4096, 1, 2, 3, first=4096))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block": 48}, r"\(block\): one of 32"),
        ({"x": torch.ones(100)}, r"\(x\): a multiple of 64"),
        ({"out": torch.ones(64)}, r"\(out\): 128 entries"),
        ({"shard": 96}, r"\(shard\): a multiple of the block, 64, got 96"),
        ({"random": philox.RandomBits(1, torch.tensor(1), first=256)}, "multiple of 4096"),
    ],
)
def test_wrong_arguments_are_named(changes: Any, words: str) -> None:
    arguments = {
        "x": torch.ones(128),
        "out": torch.ones(128),
        "block": 64,
        "random": philox.RandomBits(1, torch.tensor(1)),
    }
    with pytest.raises(ValueError, match=words):
        hadamard(**(arguments | changes))


def fuzz(run: Any, rng: random.Random) -> None:
    block = rng.choice(BLOCKS)
    x = torch.randn(block * rng.randrange(6))
    key = (torch.tensor(rng.randrange(2**40)), rng.randrange(2**63), 1, 4096 * rng.randrange(5))
    rest = (*key, rng.choice([x.numel(), block * rng.randrange(1, 4)]))
    run(hadamard_op, x, torch.empty_like(x), block, rng.random() < 0.5, *rest)
