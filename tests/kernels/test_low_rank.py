"""PowerSGD's products and factors: machines agree bit for bit, and the mathematics holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.kernels import (
    Matrices,
    decode_low_rank,
    low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    unit_rows,
    use_kernels,
)
from commhooks.kernels._matrices import runs_of
from tests.kernels.inputs import CPP, DTYPES, plain, same, tricky
from tests.kernels.machines import machines, on

KERNELS = {
    "low_rank.cu": [
        *(
            f"{name}<{dtype}>"
            for name in ("multiply_right", "multiply_left", "expand")
            for dtype in CPP.values()
        ),
        *("add_segments", "add_chunks", "orthonormalize", "unit_rows"),
    ]
}
# Offset, rows, columns, rank: gaps, equals in a row, one-sided shapes, all kinds of remainders.
PLACES = (
    *((3, 5, 7, 2), (40, 5, 7, 2), (77, 5, 7, 2), (120, 1, 600, 1), (720, 70, 3, 3)),
    *((930, 65, 33, 9), (3080, 10, 1030, 4), (13380, 200, 64, 4)),
)
NUMEL = 26200
MATRICES = Matrices(PLACES)


def bucket(dtype: torch.dtype = torch.float32, seed: int = 0, *, hard: bool = False) -> Tensor:
    return (tricky if hard else plain)(NUMEL, dtype, seed)


def factors(seed: int = 1) -> tuple[Tensor, Tensor]:
    left, right = plain(MATRICES.left_numel, seed=seed), plain(MATRICES.right_numel, seed=seed + 1)
    right[::8], right[4::8] = 0.0, -0.0  # products are zeros of both signs
    return left, right


def run_all(run: Any, x: Tensor) -> list[Tensor]:
    """What every op makes of a bucket."""
    table, results = MATRICES.table, []
    for residual, total in ((None, False), (None, True), (plain(NUMEL, seed=5), True)):
        left, right = factors()
        sums = torch.zeros(NUMEL) if total else None
        run(low_rank.multiply_right_op, x, residual, sums, table, right, left)
        results += [left] if sums is None else [left, sums]
    left, right = factors()
    run(low_rank.multiply_right_op, x, sums, sums, table, right, left)  # over the residual
    results.append(sums)
    if x.dtype == torch.float32:
        sums, again = x.clone(), torch.empty_like(left)
        run(low_rank.multiply_right_op, sums, plain(NUMEL), sums, table, right, again)  # over x
        results += [sums, again]
    run(low_rank.multiply_left_op, x, table, left, right)
    results.append(right.clone())
    out = x.clone()
    run(low_rank.expand_op, *factors(), None, None, None, table, None, out, None)
    results.append(out)
    for flag in (True, False):
        out = x.clone()
        finite = torch.tensor(flag)
        run(low_rank.expand_op, *factors(), None, None, None, table, None, out, finite)
        results.append(out)
    total, unsent, out = plain(NUMEL, seed=7), plain(NUMEL), x.clone()
    given = [
        (total, unsent, out),
        (total, total, out),
        *([(out, unsent, out)] if x.dtype == torch.float32 else []),
    ]
    for tensors in given:  # apart, over the total, and over the bucket
        total, unsent, out = (one.clone() for one in tensors)
        if tensors[0] is tensors[1]:
            unsent = total
        elif tensors[0] is tensors[2]:
            total = out
        run(low_rank.expand_op, *factors(), *factors(3), total, table, unsent, out, None)
        results += [total, unsent, out]
    return [*results, *run_factors(run, x)]


def run_factors(run: Any, x: Tensor) -> list[Tensor]:
    left, right = factors()
    left[: NUMEL // 4] = x[: NUMEL // 4].float()[: len(left)]
    right[7:14] = 0.0
    run(low_rank.orthonormalize_op, left, MATRICES.table)
    run(low_rank.unit_rows_op, right, torch.ones_like(right), MATRICES.table)
    return [left, right]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hard", [False, True])
def test_kernels_of_all_machines_agree_bit_for_bit(dtype, hard):
    x, first = bucket(dtype, hard=hard), None
    for machine in machines():
        with on(machine, KERNELS) as run:
            results = run_all(run, x)
        first = first or results
        for i, (one, other) in enumerate(zip(first, results, strict=True)):
            assert same(one, other), (machine, i)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("mode", ["native", "definition"])
def test_products_are_those_of_the_matrices(dtype, mode):
    x, work = bucket().to(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    residual, total = plain(NUMEL, seed=9).to(work), torch.zeros(NUMEL, dtype=work)
    left, right = (factor.to(work) for factor in factors())
    p, q = torch.empty_like(left), torch.empty_like(right)
    sent = [factor.to(work) for factor in factors(3)]
    out, rest = x.clone(), torch.zeros_like(total)
    with use_kernels(mode):
        multiply_right(MATRICES, x, right, p, residual=residual, total=total)
        multiply_left(MATRICES, x, left, q)
        decode_low_rank(MATRICES, left, right, out, sent=sent, total=residual, unsent=rest)
        alone = x.clone()
        decode_low_rank(MATRICES, left, right, alone)
    assert torch.equal(alone, out)
    expected = x.double()
    where = 0, 0
    for offset, rows, columns, rank in PLACES:
        part = slice(offset, offset + rows * columns)
        of_left = slice(where[0], where[0] + rank * rows)
        of_right = slice(where[1], where[1] + rank * columns)
        where = of_left.stop, of_right.stop
        a, b = left[of_left].view(rank, rows).double(), right[of_right].view(rank, columns).double()
        c, d = sent[0][of_left].view(rank, rows).double(), sent[1][of_right].view(rank, columns)
        m, e = (flat[part].view(rows, columns).double() for flat in (x, residual))

        def near(got: Tensor, want: Tensor, magnitudes: Tensor, terms: int) -> None:
            kind = torch.finfo(got.dtype)
            bound = terms * kind.eps * magnitudes + max(kind.tiny * kind.eps, 1e-37)
            assert ((got.double().view(want.shape) - want).abs() <= bound).all()

        near(p[of_left], b @ (m + e).T, b.abs() @ (m.abs() + e.abs()).T, columns + 1)
        near(q[of_right], a @ m, a.abs() @ m.abs(), rows)
        near(out[part], a.T @ b, a.abs().T @ b.abs(), rank)
        d = d.double()
        near(rest[part], e - c.T @ d, c.abs().T @ d.abs() + e.abs(), rank + 1)
        torch.testing.assert_close(total[part].double(), (m + e).flatten(), rtol=1e-6, atol=0)
        expected[part] = out[part].double()
    assert torch.equal(out.double(), expected)  # what lies between matrices was left alone


@pytest.mark.parametrize("columns", [1056, 1057])
def test_large_results_are_those_of_small_ones(columns):
    """They are written past the cache; every row of ``left`` and ``right`` is tried alone too."""
    matrices, some = Matrices([(0, 1000, columns, 2)]), Matrices([(0, 10, columns, 2)])
    left, right = plain(matrices.left_numel), plain(matrices.right_numel, seed=1)
    few = left.view(2, 1000)[:, 500:510].contiguous().flatten()
    total, piece = plain(1000 * columns, seed=2), slice(500 * columns, 510 * columns)
    for machine in machines(orders=()):
        results = []
        with on(machine, KERNELS) as run:
            for which, p, whole in ((matrices, left, total), (some, few, total[piece].clone())):
                out, unsent, again = (torch.empty_like(whole) for _ in range(3))
                run(low_rank.expand_op, p, right, None, None, None, which.table, None, out, None)
                run(low_rank.expand_op, p, right, p, right, whole, which.table, unsent, again, None)
                assert torch.equal(out, again), machine
                assert torch.equal(unsent, whole - out), machine
                results.append(out)
        assert torch.equal(results[0][piece], results[1]), machine


def conditioned(rows: int, rank: int, condition: float) -> Tensor:
    """A matrix with singular values from 1 down to 1 / condition."""
    generator = torch.Generator().manual_seed(rank)
    draw = [torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in (rows, rank)]
    left, right = (torch.linalg.qr(one)[0] for one in draw)
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


def test_equal_matrices_at_equal_distances_are_one_run():
    runs = runs_of(MATRICES.table)
    assert [run.matrices for run in runs] == [3, 1, 1, 1, 1, 1]
    uneven = Matrices([(0, 5, 7, 2), (40, 5, 7, 2), (90, 5, 7, 2), (140, 5, 7, 2)])
    assert [run.matrices for run in runs_of(uneven.table)] == [2, 2]
    assert runs_of(Matrices([]).table) == ()


@both
def test_a_flag_makes_matrices_nan(mode):
    out = bucket()
    with use_kernels(mode):
        decode_low_rank(MATRICES, *factors(), out, finite=torch.tensor(False))
    covered = sum(rows * columns for _, rows, columns, _ in PLACES)
    assert out.isnan().sum() == covered
    good = bucket()
    with use_kernels(mode):
        decode_low_rank(MATRICES, *factors(), out, finite=torch.tensor(True))
        decode_low_rank(MATRICES, *factors(), good)
    assert same(out, good)


def test_no_matrices_are_no_work():
    empty, nothing = Matrices([]), torch.empty(0)
    multiply_right(empty, torch.ones(3), nothing, nothing)
    orthonormalize(empty, nothing)
    assert len(empty) == empty.left_numel == 0


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": torch.ones(NUMEL, dtype=torch.int32)}, TypeError, r"\(x\): dtype is one of"),
        ({"x": torch.ones(100)}, ValueError, r"\(x\): 26180 entries or more, got 100"),
        ({"right": torch.ones(4)}, ValueError, r"\(right\): \d+ entries, got 4"),
        ({"residual": torch.ones(NUMEL)}, ValueError, r"\(total\): needed with a residual"),
    ],
)
def test_wrong_arguments_are_named(changes: Any, error: Any, words: str) -> None:
    left, right = factors()
    arguments = {"matrices": MATRICES, "x": bucket(), "right": right, "left": left}
    with pytest.raises(error, match=words):
        multiply_right(**(arguments | changes))


def test_what_is_left_needs_what_was_sent():
    left, right = factors()
    out, unsent = bucket(), torch.zeros(NUMEL)
    with pytest.raises(ValueError, match=r"decode_low_rank\(sent, total\): needed for unsent"):
        decode_low_rank(MATRICES, left, right, out, unsent=unsent)
    with pytest.raises(ValueError, match=r"\(total\): 26200 entries, got 3"):
        decode_low_rank(
            MATRICES, left, right, out, sent=(left, right), total=torch.ones(3), unsent=unsent
        )


def fuzz(run: Any, rng: random.Random) -> None:
    places, offset = [], 0
    for _ in range(rng.randrange(4)):
        rows, columns = rng.randrange(1, 80), rng.choice([rng.randrange(1, 70), 513])
        places.append((offset + rng.randrange(5), rows, columns, rng.randrange(1, 10)))
        offset = places[-1][0] + rows * columns
    matrices = Matrices(places)
    x = torch.randn(offset + rng.randrange(3)).to(rng.choice(DTYPES))
    left, right = torch.randn(matrices.left_numel), torch.randn(matrices.right_numel)
    residual, total = (torch.randn(len(x)) if rng.random() < 0.5 else None for _ in range(2))
    total = residual if total is None else total
    run(low_rank.multiply_right_op, x, residual, total, matrices.table, right, left)
    run(low_rank.multiply_left_op, x, matrices.table, left, right)
    run(low_rank.orthonormalize_op, left, matrices.table)
    run(low_rank.unit_rows_op, right, torch.randn_like(right), matrices.table)
    if rng.random() < 0.5:
        run(low_rank.expand_op, left, right, None, None, None, matrices.table, None, x, None)
    else:
        sent = torch.randn_like(left), torch.randn_like(right)
        unsent = total if rng.random() < 0.5 and total is not None else torch.randn(len(x))
        total = torch.randn(len(x)) if total is None else total
        run(low_rank.expand_op, left, right, *sent, total, matrices.table, unsent, x, None)
