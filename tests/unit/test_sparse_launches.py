"""What the host asks of a GPU for one bucket of a sparse scheme."""

from __future__ import annotations

import pytest

import commhooks.research.baselines  # noqa: F401  # registers schemes
from commhooks import make
from experiments.tools.fake_gpu import counts_of

SHAPES = [(512, 256), (256,)]


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize(
    ("name", "most"), [("topk", 5), ("random_k", 8), ("random_block", 16), ("dgc", 22)]
)
def test_launches_do_not_depend_on_the_number_of_ranks(name: str, most: int, world_size: int):
    assert counts_of(make(name), SHAPES, world_size=world_size).launches <= most


def test_top_k_takes_two_launches_and_a_sum_of_payloads_one() -> None:
    counts = counts_of(make("topk"), SHAPES, world_size=64)
    assert {name: counts.kernels[name] for name in ("sample", "select", "scatter_sum")} == {
        "sample": 1,
        "select": 1,
        "scatter_sum": 1,
    }


def test_aligned_rows_never_make_the_host_wait() -> None:
    counts_of(make("aligned_topk"), SHAPES, world_size=8)  # raises where the host would wait
