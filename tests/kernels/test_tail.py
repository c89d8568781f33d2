"""The tail of a bucket is gathered and scattered piece by piece."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commhooks.kernels import gather_tail, scatter_tail, tail_table
from commhooks.kernels.tail import gather_tail_op, scatter_tail_op
from tests.kernels.inputs import CPP, DTYPES, same, tricky
from tests.kernels.machines import machines, on

KERNELS = {
    "tail.cu": [f"{op}<{t}>" for op in ("gather_tail", "scatter_tail") for t in CPP.values()]
}
SPANS = [(0, 1), (5, 37), (40, 40), (64, 4000), (4001, 4099)]
TABLE = tail_table(SPANS)
N, LENGTH = 4200, int(TABLE[-1, 1])


def outputs(run: Any, dtype: torch.dtype, *, full: bool) -> list[torch.Tensor]:
    x, tail = tricky(N, dtype), torch.full((LENGTH,), 7.0)
    kept = tricky(N).roll(1) if full else None
    total = torch.full((N,), 5.0) if full else None
    run(gather_tail_op, x, kept, total, tail, TABLE)
    out = torch.full((N,), 3.0).to(dtype)
    sent, unsent = (tail.roll(3), torch.full((N,), 2.0)) if full else (None, None)
    run(scatter_tail_op, tail, out, sent, total, unsent, TABLE)
    found = [tail, out] + [one for one in (total, unsent) if one is not None]
    if unsent is not None:  # all was sent, and in place
        run(scatter_tail_op, tail, out, None, None, unsent, TABLE)
        found.append(unsent.clone())
        run(scatter_tail_op, tail, out, sent, total, total, TABLE)
    return found


def define(op: Any, *args: Any) -> None:
    op.definition(*args)


@pytest.mark.parametrize("full", [False, True])
def test_kernels_equal_the_definition(full: bool) -> None:
    for dtype in DTYPES:
        expected = outputs(define, dtype, full=full)
        for machine in machines(orders=(0, 5)):
            with on(machine, KERNELS) as run:
                got = outputs(run, dtype, full=full)
            for one, other in zip(expected, got, strict=True):
                assert same(one, other), (machine, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_what_was_gathered_goes_back_to_its_place(dtype: torch.dtype) -> None:
    work = torch.promote_types(dtype, torch.float32)
    x, tail = torch.arange(N).to(dtype), torch.empty(LENGTH, dtype=work)
    gather_tail(x, tail, TABLE, residual=None, total=None)
    assert torch.equal(tail, torch.cat([x[a:b] for a, b in SPANS]).to(work))
    out = torch.full_like(x, -1.0)
    scatter_tail(tail, out, TABLE, sent=None, total=None, unsent=None)
    inside = torch.zeros(N, dtype=torch.bool)
    for begin, end in SPANS:
        inside[begin:end] = True
    assert torch.equal(out, torch.where(inside, x, -1.0).to(dtype))


def test_a_mean_may_overwrite_the_total() -> None:
    total, unsent = torch.ones(N), torch.zeros(N)
    tail, sent = torch.full((LENGTH,), 2.0), torch.full((LENGTH,), 0.25)
    scatter_tail(tail, total, TABLE, sent=sent, total=total, unsent=unsent)
    assert unsent.sum() == 0.75 * LENGTH
    assert total.sum() == N + LENGTH


def test_wrong_arguments_are_named() -> None:
    x, tail = torch.ones(N), torch.ones(LENGTH)
    for call, words in (
        (lambda: tail_table([(3, 5), (4, 6)]), "increasing, without overlap"),
        (lambda: gather_tail(x[:50], tail, TABLE, residual=None, total=None), "4099 entries or"),
        (lambda: gather_tail(x, tail[1:], TABLE, residual=None, total=None), r"tail\): 4067 ent"),
        (
            lambda: gather_tail(x, tail, TABLE.flip(0), residual=None, total=None),
            "as tail_table makes it",
        ),
        (
            lambda: scatter_tail(tail, x, TABLE, sent=tail, total=None, unsent=torch.ones(N)),
            "needed with sent",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def fuzz(run: Any, rng: random.Random) -> None:
    places = sorted(rng.randrange(3000) for _ in range(2 * rng.randrange(6)))
    table = tail_table(list(zip(places[::2], places[1::2], strict=True)))
    n, length = 3000 + rng.randrange(100), int(table[-1, 1])
    x = torch.randn(n).to(rng.choice(DTYPES))
    kept, total = (torch.randn(n) if rng.random() < 0.5 else None for _ in range(2))
    run(gather_tail_op, x, kept, total, torch.empty(length), table)
    sent = torch.randn(length) if total is not None else None
    run(scatter_tail_op, torch.randn(length), x, sent, total, torch.empty(n), table)
