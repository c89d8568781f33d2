"""Random entries by a shared counter: all implementations agree, places are what they should be."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from commhooks.kernels import random_k, random_places
from tests.kernels.inputs import CPP, DTYPES, LARGE, SIZES, plain, tricky, unaligned
from tests.kernels.machines import assert_agree, machines, on

KERNELS = {
    "random_k.cu": [
        *(f"{name}<{t}>" for name in ("gather_random", "scatter_random") for t in CPP.values())
    ]
}
KEY = (torch.tensor(5), 2**45 + 3, 7)


def outputs(run: Any, x: torch.Tensor, k: int) -> list[torch.Tensor]:
    n, results = x.numel(), []
    for kept, rest in ((False, False), (False, True), (True, True)):
        values, residual = torch.empty(k), plain(n, seed=1) if kept else None
        left = torch.full((n,), 7.0)
        run(random_k.gather_random_op, x, values, residual, left if rest else None, *KEY)
        results += [values, left]
    for finite in (None, torch.tensor(True), torch.tensor(False)):
        out = torch.full((n,), 7.0, dtype=x.dtype)
        run(random_k.scatter_random_op, values, out, 1 / 3, finite, *KEY)
        results.append(out)
    return results


def test_kernels_equal_the_definition():
    for dtype, n in itertools.product(DTYPES, SIZES):
        for k in sorted({0, 1, n // 7, n} & set(range(n + 1))):
            x = (unaligned if n % 2 else tricky)(n, dtype)
            assert_agree(KERNELS, outputs, x, k)
    large = [machine for machine in machines() if "emulator" not in machine]
    assert_agree(KERNELS, outputs, tricky(LARGE[0]), LARGE[0] // 7, on_machines=large)


@pytest.mark.parametrize(("n", "k"), [(1000, 10), (1000, 999), (1000, 1000), (17, 3), (2**20, 999)])
def test_places_ascend_one_in_each_stratum(n, k):
    places = random_places(n, k, 1, 2, 3)
    begins = torch.arange(k) * n // k
    assert (begins <= places).all()
    assert (places < torch.arange(1, k + 1) * n // k).all()
    assert (places.diff() > 0).all()


@pytest.mark.slow
def test_every_place_is_as_likely():
    n, k, draws = 60, 6, 4000
    counts = torch.zeros(n)
    for step in range(draws):
        counts[random_places(n, k, step, 1, 0)] += 1
    expected = draws * k / n
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 110  # 54 degrees of freedom: once in 100,000


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("feedback", [True, False])
def test_an_entry_that_is_not_finite_is_found_by_its_stratum(feedback, bad):
    # 97 strata of 5000 entries are 51 or 52 long; warps take 39 of them.
    for place in (0, 51, 2048, 4999):
        x, places = plain(5000), random_places(5000, 97, 5, *KEY[1:])
        x[place] = bad
        for machine in machines():
            values, left = torch.empty(97), torch.empty(5000) if feedback else None
            with on(machine, KERNELS) as run:
                run(random_k.gather_random_op, x, values, None, left, *KEY)
            (stratum,) = values.isnan().nonzero().flatten().tolist()
            assert stratum * 5000 // 97 <= place < (stratum + 1) * 5000 // 97
            kept = [j for j in range(97) if j != stratum]
            assert torch.equal(values[kept], x[places[kept]]), machine


def fuzz(run: Any, rng: random.Random) -> None:
    n = rng.choice([1, rng.randrange(1, 300), rng.randrange(1, 5000)])
    x = torch.randn(n).to(rng.choice(DTYPES))
    values = torch.empty(rng.randrange(n + 1))
    left = torch.empty(n) if rng.random() < 0.7 else None
    kept = torch.randn(n) if left is not None and rng.random() < 0.5 else None
    key = (torch.tensor(rng.randrange(2**40)), rng.randrange(2**63), 1)
    run(random_k.gather_random_op, x, values, kept, left, *key)
    finite = rng.choice([None, torch.tensor(True), torch.tensor(False)])
    run(random_k.scatter_random_op, values, torch.empty(n, dtype=x.dtype), 0.5, finite, *key)
