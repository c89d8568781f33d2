"""PowerSGD's products: machines agree bit for bit, and the mathematics holds."""

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
    subtract_low_rank,
    tail_table,
    use_kernels,
)
from commhooks.kernels._matrices import runs_of
from tests.kernels.inputs import CPP, DTYPES, plain, same, tricky
from tests.kernels.machines import ORDERS, define, machines, on

KERNELS = {
    "low_rank.cu": [
        f"{name}<{dtype}>"
        for name in ("multiply_right", "multiply_left", "expand", "add_segments", "add_chunks")
        for dtype in CPP.values()
    ]
    + ["subtract_low_rank"]
}
# Offset, rows, columns, rank: gaps, equals in a row, one-sided shapes, all kinds of remainders.
PLACES = (
    *((3, 5, 7, 2), (40, 5, 7, 2), (77, 5, 7, 2), (120, 1, 600, 1), (720, 70, 3, 3)),
    *((930, 65, 33, 9), (3080, 10, 1030, 4), (13380, 200, 64, 4)),
)
NUMEL = 26200
MATRICES = Matrices(PLACES)
NONE = (None, None, None)  # no copy, no tail


def bucket(dtype: torch.dtype = torch.float32, seed: int = 0, *, hard: bool = False) -> Tensor:
    return (tricky if hard else plain)(NUMEL, dtype, seed)


def factors(seed: int = 1) -> tuple[Tensor, Tensor]:
    left, right = plain(MATRICES.left_numel, seed=seed), plain(MATRICES.right_numel, seed=seed + 1)
    right[::8], right[4::8] = 0.0, -0.0  # products are zeros of both signs
    return left, right


def run_all(run: Any, x: Tensor) -> list[Tensor]:
    """The results of every op on a bucket."""
    table, results = MATRICES.table, []
    for which, op in enumerate((low_rank.multiply_right_op, low_rank.multiply_left_op)):
        for residual, total in ((None, False), (None, True), (plain(NUMEL, seed=5), True)):
            given, made = factors()[:: -1 if which == 0 else 1]
            sums = torch.zeros(NUMEL) if total else None
            copy = torch.zeros_like(made)
            run(op, x, residual, sums, table, given, made, copy, None, None)
            assert same(copy, made)
            results += [made] if sums is None else [made, sums]
        given, made = factors()[:: -1 if which == 0 else 1]
        run(op, x, sums, sums, table, given, made, *NONE)  # over the residual
        results += [sums, made]
        if x.dtype == torch.float32:
            sums, again = x.clone(), torch.empty_like(made)
            run(op, sums, plain(NUMEL), sums, table, given, again, *NONE)  # over x
            results += [sums, again]
    for flag in (None, torch.tensor(True), torch.tensor(False)):
        out = x.clone()
        run(low_rank.expand_op, *factors(), table, out, flag, None, None)
        results.append(out)
    total, unsent = plain(NUMEL, seed=7), plain(NUMEL)
    run(low_rank.subtract_op, total, table, *factors(3), unsent, None, None)
    run(low_rank.subtract_op, total, table, *factors(3), total, None, None)
    return [*results, total, unsent]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hard", [False, True])
def test_kernels_of_all_machines_agree_bit_for_bit(dtype, hard):
    x, first = bucket(dtype, hard=hard), None
    for machine in machines(orders=ORDERS):
        with on(machine, KERNELS) as run:
            results = run_all(run, x)
        first = first or results
        for i, (tensor, other) in enumerate(zip(first, results, strict=True)):
            assert same(tensor, other), (machine, i)


SHORT = {"a long row": (PLACES, 37), "all but an entry": (((2, 9, 1100, 5),), 1099)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("places", "lacking"), SHORT.values(), ids=SHORT)
def test_a_short_last_row_is_one_that_ends_in_zeros(places, lacking, dtype):
    whole = Matrices(places)
    end = whole.end - lacking
    short = Matrices(places, end)
    made = (short.left_numel, short.right_numel)
    left, right = (plain(n, seed=n) for n in made)
    x, kept = plain(end, dtype), plain(end, seed=5)
    zeros = torch.zeros(lacking)

    def outputs(run: Any, table: Tensor, *parts: Tensor) -> list[Tensor]:
        x, kept = parts
        products = [plain(n) for n in made]
        sums, out, unsent = torch.zeros_like(kept), torch.zeros_like(x), torch.zeros_like(kept)
        run(low_rank.multiply_right_op, x, kept, sums, table, right, products[0], *NONE)
        run(low_rank.multiply_left_op, x, kept, sums, table, left, products[1], *NONE)
        plainly = [plain(n) for n in made]
        run(low_rank.multiply_right_op, x, None, None, table, right, plainly[0], *NONE)
        run(low_rank.multiply_left_op, x, None, None, table, left, plainly[1], *NONE)
        run(low_rank.expand_op, left, right, table, out, None, None, None)
        run(low_rank.subtract_op, kept, table, left, right, unsent, None, None)
        return [*products, *plainly, sums[:end], out[:end], unsent[:end]]

    padded = torch.cat([x, zeros.to(dtype)]), torch.cat([kept, zeros])
    for machine in machines(orders=ORDERS):
        with on(machine, KERNELS) as run:
            actual = outputs(run, short.table, x, kept)
            expected = outputs(run, whole.table, *padded)
        for i, (tensor, other) in enumerate(zip(actual, expected, strict=True)):
            assert same(tensor, other), (machine, places, i)
    defined = outputs(define, short.table, x, kept)
    for tensor, other in zip(defined, outputs(define, whole.table, *padded), strict=True):
        assert same(tensor, other)


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
        sums, q_of_sum = torch.zeros_like(total), torch.empty_like(q)
        multiply_left(MATRICES, x, left, q_of_sum, residual=residual, total=sums)
        decode_low_rank(MATRICES, left, right, out)
        subtract_low_rank(MATRICES, residual, *sent, rest)
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

        def near(actual: Tensor, want: Tensor, magnitudes: Tensor, terms: int) -> None:
            kind = torch.finfo(actual.dtype)
            bound = terms * kind.eps * magnitudes + max(kind.tiny * kind.eps, 1e-37)
            assert ((actual.double().view(want.shape) - want).abs() <= bound).all()

        near(p[of_left], b @ (m + e).T, b.abs() @ (m.abs() + e.abs()).T, columns + 1)
        near(q[of_right], a @ m, a.abs() @ m.abs(), rows)
        near(q_of_sum[of_right], a @ (m + e), a.abs() @ (m.abs() + e.abs()), rows + 1)
        assert torch.equal(sums[part], total[part])
        near(out[part], a.T @ b, a.abs().T @ b.abs(), rank)
        d = d.double()
        near(rest[part], e - c.T @ d, c.abs().T @ d.abs() + e.abs(), rank + 1)
        torch.testing.assert_close(total[part].double(), (m + e).flatten(), rtol=1e-6, atol=0)
        expected[part] = out[part].double()
    assert torch.equal(out.double(), expected)  # what lies between matrices was left alone


@pytest.mark.parametrize("offset", [0, 7])
@pytest.mark.parametrize("columns", [1056, 1057])
def test_large_results_are_those_of_small_ones(columns, offset):
    """Large results are written past the cache; single rows of ``left`` and ``right`` are tried."""
    n, last = offset + 1000 * columns, 500 * columns + offset
    matrices, some = Matrices([(offset, 1000, columns, 2)]), Matrices([(0, 10, columns, 2)])
    left, right = plain(matrices.left_numel), plain(matrices.right_numel, seed=1)
    few = left.view(2, 1000)[:, 500:510].contiguous().flatten()
    total, piece = plain(n, seed=2), slice(last, last + 10 * columns)
    for machine in machines(orders=()):
        results = []
        with on(machine, KERNELS) as run:
            for which, p, whole in ((matrices, left, total), (some, few, total[piece].clone())):
                out, unsent = torch.zeros_like(whole), whole.clone()
                run(low_rank.expand_op, p, right, which.table, out, None, None, None)
                run(low_rank.subtract_op, whole, which.table, p, right, unsent, None, None)
                assert torch.equal(unsent, whole - out), machine
                results.append(out)
        assert torch.equal(results[0][piece], results[1]), machine


both = pytest.mark.parametrize("mode", ["native", "definition"])


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


@pytest.mark.parametrize("machine", machines(orders=(0,)))
def test_factors_of_matrices_without_entries_are_zero(machine: str) -> None:
    matrices = Matrices([(0, 3, 0, 2), (0, 0, 4, 2), (0, 2, 5, 1), (10, 6, 0, 1)])
    x, left, right = torch.ones(10), torch.ones(14), torch.ones(13)
    with on(machine, KERNELS) as run:
        made = torch.full_like(left, torch.nan)
        run(low_rank.multiply_right_op, x, *NONE[:2], matrices.table, right, made, *NONE)
        assert made.tolist() == [0.0] * 6 + [5.0] * 2 + [0.0] * 6
        made = torch.full_like(right, torch.nan)
        run(low_rank.multiply_left_op, x, *NONE[:2], matrices.table, left, made, *NONE)
        assert made.tolist() == [0.0] * 8 + [2.0] * 5


def test_no_matrices_are_no_work():
    empty, nothing = Matrices([]), torch.empty(0)
    multiply_right(empty, torch.ones(3), nothing, nothing)
    assert len(empty) == empty.left_numel == 0


def fuzz(run: Any, rng: random.Random) -> None:
    places, spans, offset = [], [], 0
    for _ in range(rng.randrange(4)):
        rows, columns = rng.randrange(1, 80), rng.choice([rng.randrange(1, 70), 513])
        begin = offset + rng.choice([0, rng.randrange(600)])
        spans.append((offset, begin))
        places.append((begin, rows, columns, rng.randrange(1, 10)))
        offset = begin + rows * columns
    lacking = rng.randrange(places[-1][2]) if places else 0
    offset -= lacking
    matrices, tails = Matrices(places, offset), tail_table(spans)
    x = torch.randn(offset + rng.randrange(3)).to(rng.choice(DTYPES))
    left, right = torch.randn(matrices.left_numel), torch.randn(matrices.right_numel)
    residual, total = (torch.randn(len(x)) if rng.random() < 0.5 else None for _ in range(2))
    total = residual if total is None else total
    for op, given, made in (
        (low_rank.multiply_right_op, right, left),
        (low_rank.multiply_left_op, left, right),
    ):
        copy = torch.empty_like(made) if rng.random() < 0.5 else None
        tail = torch.empty(int(tails[-1, 1])) if rng.random() < 0.5 else None
        table = None if tail is None else tails
        run(op, x, residual, total, matrices.table, given, made, copy, table, tail)
    run(low_rank.expand_op, left, right, matrices.table, x, None, table, tail)
    sent = None if tail is None or rng.random() < 0.5 else torch.randn_like(tail)
    total = torch.randn(len(x)) if total is None else total
    unsent = total if rng.random() < 0.5 else torch.randn(len(x))
    factors = torch.randn_like(left), torch.randn_like(right)
    run(low_rank.subtract_op, total, matrices.table, *factors, unsent, table, sent)
