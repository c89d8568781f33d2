"""Sums of sparse payloads: in order, rounded once, the same everywhere."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.kernels import scatter_sum, use_kernels
from commhooks.kernels.scatter import scatter_sum_op
from tests.kernels.inputs import CPP, DTYPES, same
from tests.kernels.machines import machines, on

KERNELS = {"scatter.cu": [f"scatter_sum<{t}>" for t in CPP.values()]}


def payloads(count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Rows of ascending places, some with -1 behind them, and values; rows lie apart."""
    rows = torch.full((count, 2 * k + 3), -1, dtype=torch.int32)
    for p, row in enumerate(rows):
        some = k if p % 3 else k * p // (count + 1)
        row[:some] = torch.randperm(n)[:some].sort().values
    rows[:, k : 2 * k].view(torch.float32).copy_(torch.randn(count, k))
    return rows[:, :k], rows[:, k : 2 * k].view(torch.float32)


def test_payloads_are_added_in_order():
    # More payloads than a block looks up at once, more entries than it has threads, two ranges.
    sizes = ((0, 0, 0), (0, 9, 0), (3, 1, 1), (4, 1000, 100), (130, 9000, 700), (9, 8192, 8192))
    for (count, n, k), dtype in itertools.product(sizes, DTYPES):
        indices, values = payloads(count, n, k)
        expected, actual = torch.full((2, n), 7.0, dtype=dtype)
        if n > 1000:
            values[-1, -1] = math.inf
        scatter_sum_op.definition(indices, values, expected, 1 / 3, None)
        for machine in machines():
            with on(machine, KERNELS) as run:
                run(scatter_sum_op, indices, values, actual.fill_(7.0), 1 / 3, None)
                assert same(expected, actual), (machine, count, n, k, dtype)
                finite = torch.tensor(not expected.isfinite().all())
                run(scatter_sum_op, indices, values, actual.fill_(7.0), 1 / 3, finite)
            assert same(expected, actual), (machine, count, n, k, dtype)
            assert finite == expected.isfinite().all(), (machine, count, n, k, dtype)


@pytest.mark.parametrize("mode", ["native", "definition"])
def test_a_sum_that_overflows_is_not_finite(mode):
    indices, values = torch.zeros(2, 1, dtype=torch.int32), torch.full((2, 1), 40000.0)
    finite = torch.ones((), dtype=torch.bool)
    with use_kernels(mode):
        scatter_sum(indices, values, torch.empty(40), finite=finite)
        assert finite
        scatter_sum(indices, values, torch.empty(40, dtype=torch.float16), finite=finite)
        assert not finite


def test_sums_of_payloads_are_rounded_once():
    indices = torch.zeros(3, 1, dtype=torch.int32)
    values = torch.tensor([[1.0], [2.0**-11], [2.0**-11]])
    out = torch.empty(1, dtype=torch.float16)
    scatter_sum(indices, values, out)
    assert out.item() == 1 + 2.0**-10


@pytest.mark.parametrize("mode", ["native", "definition"])
@pytest.mark.parametrize("places", [[1, -2], [1, 10], [-1, 0], [2, 1], [1, 1], [9000, 1]])
def test_a_wrong_place_is_an_error(places, mode):
    indices = torch.tensor([places], dtype=torch.int32)
    with use_kernels(mode), pytest.raises(ValueError, match="places below 10"):
        scatter_sum(indices, torch.ones(1, 2), torch.zeros(10))


def test_wrong_places_write_nothing_outside_on_a_gpu():
    for machine in machines():
        if not machine.startswith(("emulator", "gpu")):
            continue  # a kernel of the CPU raises
        indices = torch.randint(-(2**31), 2**31 - 1, (5, 600), dtype=torch.int32)
        indices[1:] %= 9000
        around = torch.full((9000 + 200,), 7.0)
        with on(machine, KERNELS) as run:
            run(scatter_sum_op, indices, torch.ones(5, 600), around[100:-100], 1.0, None)
        assert (around[:100] == 7).all()
        assert (around[-100:] == 7).all()


@pytest.mark.parametrize("mode", ["native", "definition"])
def test_minus_one_adds_nothing(mode):
    out = torch.ones(3)
    indices = torch.tensor([[2, -1], [0, -1]], dtype=torch.int32)
    with use_kernels(mode):
        scatter_sum(indices, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), out)
    assert out.tolist() == [3.0, 0.0, 1.0]


def fuzz(run: Any, rng: random.Random) -> None:
    n = rng.choice([1, rng.randrange(1, 300), rng.randrange(1, 20_000)])
    out = torch.empty(n, dtype=rng.choice(DTYPES))
    finite = rng.choice([None, torch.tensor(True)])
    run(scatter_sum_op, *payloads(rng.randrange(5), n, rng.randrange(n + 1)), out, 0.5, finite)
