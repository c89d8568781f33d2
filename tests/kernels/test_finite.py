"""Finite checks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from commhooks.kernels import all_finite, use_kernels
from commhooks.kernels.finite import finite_op
from tests.kernels.inputs import CPP, DTYPES, LARGE, SIZES, plain, tricky, unaligned
from tests.kernels.machines import assert_agree, machines

KERNELS = {"finite.cu": [f"finite<{t}>" for t in CPP.values()]}


def outputs(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    answer = torch.zeros((), dtype=torch.bool)
    run(finite_op, x, answer)
    return [answer]


def test_kernels_equal_the_definition():
    for make, n, dtype in itertools.product((tricky, unaligned, plain), (*SIZES, *LARGE), DTYPES):
        assert_agree(KERNELS, outputs, make(n, dtype), on_machines=machines(orders=(0, 5)))


@pytest.mark.parametrize("mode", ["native", "definition"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_one_entry_that_is_not_finite_is_found_anywhere(dtype, mode):
    x = plain(5000).to(dtype)
    with use_kernels(mode):
        assert all_finite(x)
        assert all_finite(x[:0])
        assert all_finite(x[::2])
        for place, bad in itertools.product((0, 31, 4096, 4999), (float("nan"), float("-inf"))):
            broken = x.clone()
            broken[place] = bad
            assert not all_finite(broken)


def fuzz(run: Any, rng: random.Random) -> None:
    x = torch.randn(rng.choice([0, 1, rng.randrange(300), rng.randrange(9000)]) + 1)
    outputs(run, (x * 10.0 ** rng.randrange(-44, 38)).to(rng.choice(list(CPP)))[1:])
