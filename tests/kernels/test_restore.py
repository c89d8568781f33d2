"""Old values are put back unless the step was good."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commhooks.kernels import restore
from commhooks.kernels.restore import restore_op
from tests.kernels.inputs import DTYPES, LARGE, SIZES, same, tricky, unaligned
from tests.kernels.machines import machines, on

KERNELS = {"restore.cu": ["restore"]}


@pytest.mark.parametrize("good", [True, False])
def test_kernels_equal_the_definition(good):
    for n in (*SIZES, *LARGE[:1]):
        for dtype in (*DTYPES, torch.float64, torch.uint8):
            values, old = tricky(n).to(dtype), unaligned(n).to(dtype)
            expected = values if good else old
            defined = values.clone()
            restore_op.definition(defined, old, torch.tensor(good))
            assert same(defined, expected)
            for machine in machines(orders=(0,)):
                actual = values.clone()
                with on(machine, KERNELS) as run:
                    run(restore_op, actual, old, torch.tensor(good), *[None] * 6)
                assert same(actual, expected), (machine, n, dtype)


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("count", [2, 4, 5, 9])
def test_pairs_of_any_size_and_dtype_are_put_back_together(good, count):
    flag = torch.tensor(good)
    for machine in (None, *machines(orders=(0,))):
        pairs = []
        for index in range(count):
            dtype = (torch.float32, torch.int64, torch.uint8, torch.bfloat16)[index % 4]
            values = torch.randn(1 + 900 * index).mul(100).to(dtype)
            pairs.append((values, (values + 1).contiguous()))
        expected = [new.clone() if good else old.clone() for new, old in pairs]
        if machine is None:
            restore(pairs, flag)
        else:
            flat = [tensor for pair in pairs[1:4] for tensor in pair]
            flat += [None] * (6 - len(flat))
            with on(machine, KERNELS) as run:
                run(restore_op, *pairs[0], flag, *flat)
            pairs, expected = pairs[:4], expected[:4]
        for (new, _), wanted in zip(pairs, expected, strict=True):
            assert same(new, wanted), machine


def test_what_is_written_twice_is_written_in_order():
    x, y, z = (torch.full((3,), float(value)) for value in range(3))
    restore([(x, y), (y, z)], torch.tensor(False))  # x gets what y was before
    assert x.tolist() == [1.0] * 3
    assert y.tolist() == [2.0] * 3


def fuzz(run: Any, rng: random.Random) -> None:
    values = torch.randn(rng.randrange(5000))
    others: list[torch.Tensor | None] = []
    for _ in range(rng.randrange(4)):
        more = torch.randn(rng.randrange(3000)).to(rng.choice((torch.float32, torch.int16)))
        others += [more, torch.zeros_like(more)]
    others += [None] * (6 - len(others))
    run(restore_op, values, torch.randn_like(values), torch.tensor(rng.random() < 0.5), *others)
