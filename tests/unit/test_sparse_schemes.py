"""Top-k, random-k and random block: errors, bytes, and what becomes of the rest."""

from __future__ import annotations

import math

import pytest
import torch

from commhooks import ErrorFeedback, Scheme, Simulation
from commhooks.research.baselines import RandomBlock
from commhooks.schemes import RandomK, TopK

N = 2**18


def normal(seed: int, n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def missing(scheme: Scheme, x: torch.Tensor, steps: int = 1) -> float:
    """|C(x) - x|^2 / |x|^2 on one rank, the mean of some steps."""
    ranks = Simulation(scheme, {"p": tuple(x.shape)}, world_size=1)
    errors = [(ranks.step([x])[0] - x).square().sum() / x.square().sum() for _ in range(steps)]
    return float(sum(errors)) / steps


@pytest.mark.parametrize(("ratio", "error"), [(0.1, 0.561), (0.01, 0.915)])
def test_a_sampled_threshold_leaves_out_little_more_than_theory_says(
    ratio: float, error: float
) -> None:
    assert math.isclose(missing(TopK(ratio, sampled=True), normal(0)), error, rel_tol=0.15)


@pytest.mark.parametrize("scheme", [RandomK(0.25), RandomBlock(0.25)])
def test_every_entry_gets_its_turn(scheme: Scheme) -> None:
    ranks = Simulation(ErrorFeedback(scheme), {"p": (64,)}, world_size=2)
    arrived = torch.zeros(64)
    for _ in range(60):
        arrived += (ranks.step([torch.ones(64)] * 2)[0] != 0).float()
    assert arrived.min() > 0


def test_payloads() -> None:
    for scheme, expected in (
        (TopK(0.01), ("all_gather", -(-8 * (N // 100) // 16) * 16)),
        (RandomK(0.01), ("all_reduce", 4 * (N // 100))),
        (RandomBlock(0.01), ("all_reduce", 4 * (N // 100))),
    ):
        ranks = Simulation(scheme, {"p": (N,)}, world_size=3)
        ranks.step([normal(rank) for rank in range(3)])
        assert ranks.requests == [expected]


def test_topk_travels_dense_where_that_is_less() -> None:
    ranks = Simulation(TopK(0.2), {"p": (1000,)}, world_size=8)
    ranks.step([normal(rank, 1000) for rank in range(8)])
    assert ranks.requests == [("all_reduce", 4000)]


# ---- top-k in two phases


def test_topk_in_two_phases_sends_as_much_on_any_number_of_ranks() -> None:
    for world_size in (2, 8):
        ranks = Simulation(TopK(0.01, pattern="two_phase"), {"p": (N,)}, world_size=world_size)
        mean = ranks.step([normal(rank) for rank in range(world_size)])[0]
        assert sum(ranks.wire_bytes) <= 2 * 8 * 0.01 * N
        assert int((mean != 0).sum()) <= 0.01 * N


# ---- aligned top-k
