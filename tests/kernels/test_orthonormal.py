"""Rows of factors become orthonormal, or unit: machines equal the definition bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.kernels import Matrices, orthonormalize, unit_rows, use_kernels
from commhooks.kernels.orthonormal import orthonormalize_op, unit_rows_op
from tests.kernels.inputs import plain, same, tricky
from tests.kernels.machines import ORDERS, assert_agree, machines

KERNELS = {"orthonormal.cu": ["orthonormalize", "unit_rows"]}
# Ranks around a group of 4 rows, and sides around 32 and 1024 partial sums.
PLACES = (
    *((0, 5, 7, 2), (40, 1, 600, 1), (700, 70, 3, 3), (1000, 65, 33, 9), (4000, 33, 32, 5)),
    *((6000, 2049, 10, 4), (30000, 20, 1025, 8), (60000, 1024, 11, 6)),
)
MATRICES = Matrices(PLACES)


def outputs(run: Any, *, hard: bool) -> list[Tensor]:
    """The results of both ops on factors, in place and not."""
    make, table = tricky if hard else plain, MATRICES.table
    left, right = make(MATRICES.left_numel), make(MATRICES.right_numel, seed=1)
    left[12:15], right[7:14] = 0.0, 0.0
    fresh, results = plain(len(right), seed=2), []
    for op, given, others in ((orthonormalize_op, left, ()), (unit_rows_op, right, (fresh,))):
        before, out, place = given.clone(), torch.full_like(given, 7.0), given.clone()
        run(op, given, *others, out, table)
        run(op, place, *others, place, table)
        assert same(given, before)
        results += [out, place]
    return results


@pytest.mark.parametrize("hard", [False, True])
def test_kernels_equal_the_definition(hard: bool) -> None:
    assert_agree(KERNELS, outputs, hard=hard, on_machines=machines(orders=ORDERS))


def conditioned(rows: int, rank: int, condition: float) -> Tensor:
    """A matrix with singular values from 1 down to 1 / condition."""
    generator = torch.Generator().manual_seed(rank)
    draw = [torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in (rows, rank)]
    left, right = (torch.linalg.qr(matrix)[0] for matrix in draw)
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), rank).double()
    return (left * values @ right).float()


def orthonormal(columns: Tensor) -> Tensor:
    """The factor of one matrix, as columns again."""
    rows, rank = columns.shape
    factor = columns.T.contiguous().flatten()
    orthonormalize(Matrices([(0, rows, 1, rank)]), factor)
    return factor.view(rank, rows).T


def assert_orthonormal(columns: Tensor) -> None:
    gram = columns.double().T @ columns.double()
    torch.testing.assert_close(gram, torch.eye(len(gram)).double(), atol=2**-21, rtol=0)


both = pytest.mark.parametrize("mode", ["native", "definition"])


@both
@pytest.mark.parametrize("rank", [1, 2, 4, 32])
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e6, 1e8])
def test_orthonormal_for_any_condition(mode, condition, rank):
    with use_kernels(mode):
        assert_orthonormal(orthonormal(conditioned(4096, rank, condition)))


@both
@pytest.mark.parametrize("shape", [(5, 2), (1, 1), (4, 4), (64, 4), (50257, 4)])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30])
def test_orthonormal_for_any_shape_and_scale(mode, shape, scale):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
    with use_kernels(mode):
        q = orthonormal(x)
    assert_orthonormal(q)
    # Column k lies in the span of the first k.
    below = (q.double().T @ x.double()).tril(-1)
    assert below.abs().max() <= 1e-5 * x.abs().max() * shape[0] ** 0.5


@both
def test_dependent_columns_become_zero_or_unit(mode):
    column = plain(30)[:, None]
    with use_kernels(mode):
        q = orthonormal(torch.cat([column, 0 * column, 2 * column, column], 1))
        assert torch.equal(orthonormal(torch.zeros(16, 4)), torch.zeros(16, 4))
    gram = q.double().T @ q.double()
    assert ((gram - gram.diag().round().diag()).abs() < 1e-6).all()
    assert gram[0, 0].round() == 1
    assert not q[:, 1].any()


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_with_its_matrix(mode, bad):
    matrices = Matrices([(0, 20, 9, 3), (180, 20, 9, 3)])
    left = plain(matrices.left_numel)
    alone = left[60:].clone()
    left[5] = bad
    with use_kernels(mode):
        orthonormalize(matrices, left)
        orthonormalize(Matrices([(0, 20, 9, 3)]), alone)
    assert left[:20].isnan().any()
    assert torch.equal(left[60:], alone)


@both
def test_unit_rows_replaces_rows_that_vanish(mode):
    matrices = Matrices([(0, 9, 8, 3), (72, 9, 8, 3), (144, 9, 8, 2)])
    right, fresh = plain(matrices.right_numel), torch.ones(matrices.right_numel)
    right[8:16] = 0.0
    right[40:48] *= 1e-9
    right[48:] = 0.0
    before = right.clone()
    with use_kernels(mode):
        unit_rows(matrices, right, fresh)
    rows, old = right.view(-1, 8), before.view(-1, 8)
    dead = torch.tensor([1, 5, 6, 7])
    alive = torch.tensor([0, 2, 3, 4])
    assert torch.equal(rows[dead], torch.ones(4, 8))
    torch.testing.assert_close(rows[alive], old[alive] / old[alive].norm(dim=1, keepdim=True))


def fuzz(run: Any, rng: random.Random) -> None:
    places = [
        (0, rng.randrange(1, 80), rng.choice([rng.randrange(1, 70), 1030]), rng.randrange(1, 10))
        for _ in range(rng.randrange(4))
    ]
    offsets = [sum(rows * columns for _, rows, columns, _ in places[:i]) for i in range(4)]
    matrices = Matrices([(at, *place[1:]) for at, place in zip(offsets, places, strict=False)])
    left, right = torch.randn(matrices.left_numel), torch.randn(matrices.right_numel)
    out = left if rng.random() < 0.5 else torch.empty_like(left)
    run(orthonormalize_op, left, out, matrices.table)
    out = right if rng.random() < 0.5 else torch.empty_like(right)
    run(unit_rows_op, right, torch.randn_like(right), out, matrices.table)
