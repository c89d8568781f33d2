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
                got = values.clone()
                with on(machine, KERNELS) as run:
                    run(restore_op, got, old, torch.tensor(good))
                assert same(got, expected), (machine, n, dtype)


def test_wrong_arguments_are_named():
    x, good = torch.ones(3), torch.ones((), dtype=torch.bool)
    for arguments, words in (
        ((x, x.double(), good), r"restore\(old\): dtype"),
        ((x, torch.ones(2), good), r"restore\(old\): 3 entries, got 2"),
        ((x, torch.ones(3), torch.ones(())), r"restore\(good\): dtype"),
        ((x, x, good), r"restore\(values, old\): have to share no memory"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            restore(*arguments)


def fuzz(run: Any, rng: random.Random) -> None:
    values = torch.randn(rng.randrange(5000))
    run(restore_op, values, torch.randn_like(values), torch.tensor(rng.random() < 0.5))
