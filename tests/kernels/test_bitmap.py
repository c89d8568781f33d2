"""Bitmaps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commhooks.kernels import pack_bits, unpack_bits
from commhooks.kernels.bitmap import pack_bits_op, unpack_bits_op
from tests.kernels.inputs import LARGE, SIZES
from tests.kernels.machines import machines, on

KERNELS = {"bitmap.cu": ["pack_bits", "unpack_bits"]}


def packed(run: Any, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.full((-(-bits.numel() // 8),), 77, dtype=torch.uint8)
    again = torch.ones_like(bits)
    run(pack_bits_op, bits, found)
    run(unpack_bits_op, found, again)
    return found, again


def test_kernels_equal_the_definition_and_undo_one_another():
    for n in (*SIZES, LARGE[0]):
        bits = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.3
        expected, again = packed(lambda op, *args: op.definition(*args), bits)
        assert torch.equal(again, bits)
        for machine in machines(orders=(0, 5)):
            with on(machine, KERNELS) as run:
                got, again = packed(run, bits)
            assert torch.equal(got, expected), (machine, n)
            assert torch.equal(again, bits), (machine, n)


def test_the_order_of_bits():
    bits, found = torch.zeros(11, dtype=torch.bool), torch.empty(2, dtype=torch.uint8)
    bits[[0, 3, 9]] = True
    pack_bits(bits, found)
    assert found.tolist() == [0b1001, 0b10]


def test_wrong_arguments_are_named():
    bits = torch.zeros(9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"pack_bits\(packed\): 2 entries, got 1"):
        pack_bits(bits, torch.empty(1, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"unpack_bits\(bits\): dtype is one of torch.bool"):
        unpack_bits(torch.empty(2, dtype=torch.uint8), bits.byte())


def fuzz(run: Any, rng: random.Random) -> None:
    packed(run, torch.rand(rng.choice([0, rng.randrange(70), rng.randrange(5000)])) < 0.5)
