"""Sketches: linear, the same on every rank, and near the norm whatever a vector looks like."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from commhooks.kernels import fingerprint, pieces_of_sizes, sketch_width
from commhooks.kernels.fingerprint import ROWS
from commhooks.verify._measure import dots_of

DRAWS = 60
LARGE = 2**17


def sketch(vectors: Sequence[Tensor], step: int) -> Tensor:
    pieces = pieces_of_sizes(tuple(vector.numel() for vector in vectors))
    flat = torch.cat([*vectors])
    rows = torch.empty(len(ROWS), len(vectors), dtype=torch.float64)
    sketches = flat.new_empty(2, pieces.width)
    fingerprint(flat, torch.zeros_like(flat), rows, sketches, pieces, step)
    return sketches[0]


def _matrix(
    rows: int, columns: int, *, row: int | None = None, column: int | None = None
) -> Tensor:
    """A matrix that is zero except for ones in one row or one column, as a flat tensor."""
    matrix = torch.zeros(rows, columns)
    matrix[slice(None) if row is None else row, slice(None) if column is None else column] = 1.0
    return matrix.view(-1)


def _few(size: int) -> Tensor:
    vector = torch.zeros(size)
    vector[torch.randperm(size)[:20]] = torch.randn(20)
    return vector


VECTORS = {
    "normal": lambda: torch.randn(4096),
    "constant": lambda: torch.ones(4096),
    "column": lambda: _matrix(64, 64, column=3),
    "column of twice the width": lambda: _matrix(64, 128, column=3),
    "column of the width": lambda: _matrix(70, 1024, column=3),
    "column of 32 widths": lambda: _matrix(70, 32 * 1024, column=3),
    "row": lambda: _matrix(64, 64, row=3),
    "few": lambda: _few(4096),
    "large": lambda: torch.randn(3 * LARGE + 5),
    "large and constant": lambda: torch.ones(8 * LARGE),
    "larger and constant": lambda: torch.ones(64 * LARGE),
    "behind the last whole row": lambda: torch.arange(96.0).ge(64).float(),
    "large column": lambda: _matrix(1024, 1024, column=3),
    "many of one size": lambda: torch.ones(4096),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_norm_is_known_to_some_percent(name: str) -> None:
    torch.manual_seed(0)
    vector = VECTORS[name]()
    size, copies = vector.numel(), 70 if name.startswith("many") else 1
    ratios = []
    for step in range(DRAWS):
        sketches = sketch([vector] * copies, step)
        squares = dots_of(sketches, sketches, [size] * copies)
        assert len(set(squares.tolist())) == 1
        ratios.append(float(squares[0].sqrt() / vector.norm()))
    # Of 60 draws none is further away than four standard deviations.
    assert float((torch.tensor(ratios) - 1).abs().max()) < 4 * (2 * sketch_width(size)) ** -0.5


def test_a_sketch_is_as_wide_as_documented() -> None:
    widths = {0: 0, 64: 64, 65: 64, 8191: 64, 8192: 128, 65_535: 512, 65_536: 1024, 10**9: 1024}
    assert {size: sketch_width(size) for size in widths} == widths
    norms = []
    for step in range(200):
        sketches = sketch([torch.randn(8192)], step)
        norms.append(float(dots_of(sketches, sketches, [8192]).sqrt()) / 8192**0.5)
    assert abs(float(torch.tensor(norms).std()) * (2 * 128) ** 0.5 - 1) < 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_up_to_64_entries_are_all_there(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vectors = [torch.randn(size, dtype=dtype) for size in (0, 1, 64, 7, 63, 0)]
    sizes = [len(vector) for vector in vectors]
    sketches = sketch(vectors, 5)
    assert sketches.dtype == dtype
    assert sketches.numel() == sum(sizes)
    torch.testing.assert_close(sketches.abs(), torch.cat(vectors).abs(), rtol=0, atol=0)


def test_the_mean_of_sketches_is_the_sketch_of_the_mean() -> None:
    torch.manual_seed(0)
    sizes = [LARGE + 3, 500, 500, 9000, 2]
    ranks = [[torch.randn(size, dtype=torch.float64) for size in sizes] for _ in range(3)]
    mean = [torch.stack(pieces).mean(0) for pieces in zip(*ranks, strict=True)]
    together = torch.stack([sketch(pieces, 7) for pieces in ranks]).mean(0)
    torch.testing.assert_close(together, sketch(mean, 7))
    # In the order of the vectors, whatever order they are computed in.
    one_by_one = torch.cat([sketch([vector], 7) for vector in mean])
    torch.testing.assert_close(together, one_by_one)


def test_products_are_those_of_the_vectors() -> None:
    torch.manual_seed(0)
    sizes, vectors = [40, 50_000], [torch.randn(40), torch.randn(50_000)]
    others = [vector + 0.1 * torch.randn(len(vector)) for vector in vectors]
    products = dots_of(sketch(vectors, 1), sketch(others, 1), sizes)
    wanted = torch.stack([torch.dot(*pair) for pair in zip(vectors, others, strict=True)]).double()
    torch.testing.assert_close(products[0], wanted[0], rtol=1e-5, atol=0)
    assert abs(float(products[1] / wanted[1]) - 1) < 4 * (2 / sketch_width(50_000)) ** 0.5


def test_a_step_draws_other_signs() -> None:
    vector = torch.ones(4096)
    assert torch.equal(sketch([vector], 3), sketch([vector], 3))
    assert not torch.equal(sketch([vector], 3), sketch([vector], 4))


def test_a_value_that_is_not_finite_shows_in_its_own_parameter_only() -> None:
    vectors = [torch.ones(300), torch.ones(300), torch.ones(300)]
    vectors[1][7] = torch.nan
    sketches = sketch(vectors, 0)
    assert dots_of(sketches, sketches, [300] * 3).isfinite().tolist() == [True, False, True]
