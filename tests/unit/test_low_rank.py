"""Ops of low-rank schemes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commhooks.kernels import (
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    subtract_low_rank,
    unit_rows,
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def conditioned(rows: int, rank: int, condition: float, seed: int = 0) -> Tensor:
    """One matrix with singular values from 1 down to 1 / condition."""
    left = torch.linalg.qr(normal(rows, rank, seed=seed, dtype=torch.float64))[0]
    right = torch.linalg.qr(normal(rank, rank, seed=seed + 1, dtype=torch.float64))[0]
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), rank).double()
    return (left * values @ right).float()[None]


def assert_orthonormal(columns: Tensor) -> None:
    # Householder vectors round at 2^-24 each; 2e-6 leaves room for sums over the rows.
    eye = torch.eye(columns.shape[-1], dtype=torch.float64).expand(len(columns), -1, -1)
    gram = columns.double().mT @ columns.double()
    torch.testing.assert_close(gram, eye, atol=2e-6, rtol=0)


@pytest.mark.parametrize("rank", [1, 2, 4, 32])
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e6, 1e8])
def test_orthonormal_for_any_condition(condition: float, rank: int) -> None:
    assert_orthonormal(orthonormalize(conditioned(4096, rank, condition)))


@pytest.mark.parametrize("shape", [(3, 5, 2), (1, 1, 1), (2, 4, 4), (500, 64, 4), (0, 3, 2)])
def test_orthonormal_for_any_shape(shape: tuple[int, int, int]) -> None:
    result = orthonormalize(normal(*shape))
    assert result.shape == shape
    assert_orthonormal(result)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
def test_orthonormal_for_any_scale(scale: float, rank: int) -> None:
    assert_orthonormal(orthonormalize(normal(2, 50, rank) * scale))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_orthonormal_for_zeros(rank: int) -> None:
    assert_orthonormal(orthonormalize(torch.zeros(3, 16, rank)))


def test_orthonormal_for_dependent_columns() -> None:
    column = normal(2, 30, 1)
    assert_orthonormal(orthonormalize(torch.cat([column, 0 * column, 2 * column, column], dim=2)))


@pytest.mark.parametrize("rank", [1, 3])
def test_orthonormalize_keeps_the_span(rank: int) -> None:
    x = normal(4, 40, rank, dtype=torch.float64)
    q = orthonormalize(x)
    torch.testing.assert_close(q @ (q.mT @ x), x)


@pytest.mark.parametrize("rank", [1, 3])
def test_orthonormalize_treats_matrices_of_a_batch_alone(rank: int) -> None:
    x = normal(2, 12, rank)
    x[1] *= 1000  # a norm taken over both would be wrong for either
    alone = torch.cat([orthonormalize(x[:1]), orthonormalize(x[1:])])
    torch.testing.assert_close(orthonormalize(x), alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [1, 4])
def test_orthonormalize_repeats_bit_for_bit(rank: int) -> None:
    x = normal(7, 100, rank)
    strided = x.mT.contiguous().mT
    assert torch.equal(orthonormalize(x), orthonormalize(x.clone()))
    assert torch.equal(orthonormalize(x), orthonormalize(strided))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rank", [1, 4])
def test_orthonormalize_does_not_raise_on_non_finite_input(rank: int, bad: float) -> None:
    x = normal(3, 20, rank)
    x[1, 5, 0] = bad
    assert orthonormalize(x).shape == x.shape
    assert_orthonormal(orthonormalize(x)[[0, 2]])


def test_unit_rows_divides_each_row_by_its_norm() -> None:
    x = normal(2, 3, 8)
    unit = unit_rows(x, lambda: pytest.fail("nothing to replace"))
    torch.testing.assert_close(unit, x / x.norm(dim=2, keepdim=True))


def test_unit_rows_replaces_rows_that_vanish() -> None:
    x, fresh = normal(2, 3, 8), normal(2, 3, 8, seed=1)
    x[0, 1] = 0
    x[1, 2] *= 1e-9
    unit = unit_rows(x, lambda: fresh)
    assert torch.equal(unit[0, 1], fresh[0, 1])
    assert torch.equal(unit[1, 2], fresh[1, 2])
    torch.testing.assert_close(unit[0, 0], x[0, 0] / x[0, 0].norm())


@pytest.mark.parametrize("gap", [0, 5])
@pytest.mark.parametrize("shape", [(20, 6, 7), (3, 100, 90), (1, 1, 1), (40, 64, 64)])
def test_products_equal_matmul_in_place_or_strided(shape: tuple[int, int, int], gap: int) -> None:
    count, rows, columns = shape
    stride = rows * columns + gap
    flat = normal(count * stride)
    view = flat.as_strided(shape, (stride, columns, 1))
    rest = torch.arange(flat.numel()) % stride >= rows * columns
    before, matrices = flat.clone(), view.clone()
    left, right = normal(count, 2, rows, seed=1), normal(count, 2, columns, seed=2)
    product = left.mT @ right

    out = torch.empty_like(left)
    torch.testing.assert_close(multiply_right(view, right, out=out), right @ matrices.mT)
    out = torch.empty_like(right)
    torch.testing.assert_close(multiply_left(view, left, out=out), left @ matrices)
    subtract_low_rank(view, left, right)
    torch.testing.assert_close(view, matrices - product)
    decode_low_rank(left, right, out=view)
    torch.testing.assert_close(view, product)
    assert torch.equal(flat[rest], before[rest])


def test_decode_rounds_to_a_narrow_output() -> None:
    left, right = normal(3, 2, 10), normal(3, 2, 20)
    out = torch.empty(3, 10, 20, dtype=torch.float16)
    assert torch.equal(decode_low_rank(left, right, out=out), torch.bmm(left.mT, right).half())
