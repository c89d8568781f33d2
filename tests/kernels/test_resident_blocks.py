"""Blocks that wait for one another: several of them at once, in turns that a seed decides."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.runner import RESIDENT, emulated
from tests.kernels.inputs import same, tricky
from tests.kernels.machines import ORDERS, Runner, define
from tests.kernels.test_sparse import HOSTILE, KERNELS, large_where_sampled, outputs

# "clustered" overflows slots, so that later stages read the gradient.
CASES = [("heavy", 120_000, 1200), ("clustered", 50_000, 900), ("zeros", 200_000, 150_000)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("data", "n", "k"), CASES)
def test_the_order_of_blocks_changes_nothing(data, n, k, seed):
    x = HOSTILE[data](n)
    expected = outputs(define, x, k, residual=True, left=True)
    order = ORDERS[seed % len(ORDERS)]
    with emulated(KERNELS, order, RESIDENT, blocks=9, seed=seed):
        actual = outputs(Runner("cuda"), x, k, residual=True, left=True)
    for name, value in expected.items():
        assert same(value, actual[name]), name


@pytest.mark.parametrize("seed", range(4))
def test_one_more_stage_where_too_few_reach_the_bound(seed):
    x = large_where_sampled(100_000)
    expected = outputs(define, x, 30_000, residual=False, left=True)
    with emulated(KERNELS, 0, RESIDENT, blocks=9, seed=seed):
        actual = outputs(Runner("cuda"), x, 30_000, residual=False, left=True)
    for name, value in expected.items():
        assert same(value, actual[name]), name


def test_more_blocks_than_parts_end():
    x = tricky(5000)
    expected = outputs(define, x, 50, residual=False, left=False)
    with emulated(KERNELS, 0, RESIDENT, blocks=1000, seed=1):
        actual = outputs(Runner("cuda"), x, 50, residual=False, left=False)
    assert torch.equal(expected["indices"], actual["indices"])
