"""Norms and finite checks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from commhooks.kernels import all_finite, norms, use_kernels
from commhooks.kernels.norms import finite_op, norms_op
from tests.kernels.inputs import CPP, DTYPES, LARGE, SIZES, plain, same, tricky, unaligned
from tests.kernels.machines import machines, on

KERNELS = {
    "norms.cu": [
        *(f"{name}<{t}>" for name in ("finite", "norms") for t in CPP.values()),
        "add_norms",
    ]
}


def outputs(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.full((3,), 7.0, dtype=torch.float64), torch.ones((), dtype=torch.bool)]
    run(norms_op, x, found[0])
    run(finite_op, x, found[1])
    return found


def define(op: Any, *args: Any) -> None:
    op.definition(*args)


def test_kernels_equal_the_definition():
    for make, n, dtype in itertools.product((tricky, unaligned, plain), (*SIZES, *LARGE), DTYPES):
        x = make(n, dtype)
        expected = outputs(define, x)
        for machine in machines(orders=(0, 5)):
            with on(machine, KERNELS) as run:
                got = outputs(run, x)
            assert all(map(same, expected, got)), (machine, make, n, dtype)


@pytest.mark.parametrize("mode", ["native", "definition"])
def test_norms_are_those_of_torch(mode):
    x, out = plain(100_000), torch.empty(3, dtype=torch.float64)
    with use_kernels(mode):
        norms(x, out)
    expected = torch.stack([x.double().norm(1), x.double().square().sum(), x.abs().max().double()])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=0)


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


def test_wrong_arguments_are_named():
    out = torch.empty(3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"norms\(x\): dtype"):
        norms(torch.ones(3).int(), out)
    with pytest.raises(ValueError, match=r"norms\(out\): 3 entries, got 2"):
        norms(torch.ones(3), out[:2])


def fuzz(run: Any, rng: random.Random) -> None:
    x = torch.randn(rng.choice([0, 1, rng.randrange(300), rng.randrange(9000)]) + 1)
    outputs(run, (x * 10.0 ** rng.randrange(-44, 38)).to(rng.choice(list(CPP)))[1:])
