"""Momenta: all implementations agree."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.kernels import add_momentum
from commhooks.kernels.momentum import add_momentum_op
from tests.kernels.inputs import CPP, DTYPES, SIZES, plain, tricky, unaligned
from tests.kernels.machines import assert_agree

KERNELS = {
    "momentum.cu": [f"add_momentum<{t}, {u}>" for t, u in itertools.product(CPP.values(), repeat=2)]
}


def outputs(run: Any, x: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    old, new = tricky(x.numel(), seed=1), torch.full((x.numel(),), 7.0)
    out = None if dtype is None else torch.full_like(new, 7.0, dtype=dtype)
    run(add_momentum_op, x, old, 0.9, new, out)
    return [new, *([] if out is None else [out])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_the_definition(dtype):
    for n, to, make in itertools.product(SIZES, (None, *DTYPES), (tricky, unaligned)):
        assert_agree(KERNELS, outputs, make(n, dtype), to)


def test_the_sum_may_replace_the_gradient():
    for dtype in (*DTYPES, torch.float64):
        x, old = plain(500).to(dtype), plain(500, seed=1)
        old = old.double() if dtype == torch.float64 else old
        expected, new = x.to(old.dtype) + old * 0.5, torch.empty_like(old)
        add_momentum(x, old, 0.5, new, x)
        assert torch.equal(new, expected)
        assert torch.equal(x, expected.to(dtype))


def test_wrong_arguments_are_named():
    x = torch.ones(8)
    with pytest.raises(TypeError, match=r"add_momentum\(velocity\): dtype"):
        add_momentum(x, x.half(), 0.5, torch.empty(8))
    with pytest.raises(ValueError, match=r"add_momentum\(new\): 8 entries"):
        add_momentum(x, x.clone(), 0.5, torch.empty(9))


def fuzz(run: Any, rng: random.Random) -> None:
    n = rng.choice([0, 1, rng.randrange(300), rng.randrange(9000)])
    x = torch.randn(n).to(rng.choice(DTYPES))
    outputs(run, x, rng.choice([None, *DTYPES]))
