"""The tail of a bucket is gathered, and scattered, in the launches of the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commhooks.kernels import Matrices, subtract_low_rank, tail_table
from commhooks.kernels.low_rank import expand_op, multiply_left_op, multiply_right_op, subtract_op
from tests.kernels.inputs import DTYPES, plain, same, tricky
from tests.kernels.machines import assert_agree, machines
from tests.kernels.test_low_rank import KERNELS

SPANS = [(0, 1), (5, 37), (40, 40), (64, 4000), (4001, 4099)]
TABLE = tail_table(SPANS)
LENGTH = int(TABLE[-1, 1])
MATRICES = Matrices([(4100, 20, 70, 2), (5500, 9, 5, 3)])
N = 5600


def outputs(run: Any, dtype: torch.dtype, *, full: bool) -> list[torch.Tensor]:
    """Tails and copies of factors; each op by every machine, after the same products."""
    x, results = tricky(N, dtype), []
    x[4100:] = plain(N - 4100).to(dtype)
    left, right = plain(MATRICES.left_numel), plain(MATRICES.right_numel)
    for op, given, like in ((multiply_right_op, right, left), (multiply_left_op, left, right)):
        tail, factor = torch.full((LENGTH,), 7.0), torch.empty_like(like)
        copy = torch.empty_like(like) if full else None
        kept = tricky(N).roll(1) if full else None
        total = torch.full((N,), 5.0) if full else None
        run(op, x, kept, total, MATRICES.table, given, factor, copy, TABLE, tail)
        assert copy is None or same(copy, factor)
        results += [tail] if total is None else [tail, total[:4100]]
    out = torch.full((N,), 3.0).to(dtype)
    table, flag = MATRICES.table, torch.tensor(False)  # which leaves tails alone
    run(expand_op, left, right, table, out, flag, TABLE, tail)
    results.append(out[:4100])
    for sent in (tail.roll(3), None) if full else ():  # None: all was sent
        total, unsent = tricky(N).roll(2), torch.full((N,), 2.0)
        run(subtract_op, total, table, left, right, unsent, TABLE, sent)
        run(subtract_op, total, table, left, right, total, TABLE, sent)
        results += [unsent[:4100], total[:4100]]
    return results


@pytest.mark.parametrize("full", [False, True])
def test_kernels_equal_the_definition(full: bool) -> None:
    for dtype in DTYPES:
        tried = machines(orders=(0, 5))
        assert_agree(KERNELS, outputs, dtype, full=full, on_machines=tried)


def test_what_was_sent_is_subtracted() -> None:
    total, sent = torch.ones(N), torch.full((LENGTH,), 0.25)
    nothing = torch.empty(0), torch.empty(0)
    for given, expected in ((sent, 0.75 * LENGTH), (None, 0.0)):
        unsent = torch.zeros(N)
        subtract_low_rank(Matrices([]), total, *nothing, unsent, tail=(TABLE, given))
        assert unsent.sum() == expected
