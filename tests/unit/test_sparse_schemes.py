"""Top-k, random-k and random block: errors, bytes, and what becomes of the rest."""

from __future__ import annotations

import math

import pytest
import torch

from commhooks import ErrorFeedback, Scheme, Simulation
from commhooks.research.baselines import AlignedTopK, RandomBlock
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


@pytest.mark.parametrize("scheme", [RandomK(0.05), RandomBlock(0.05)])
def test_random_ones_leave_out_all_but_their_share(scheme: Scheme) -> None:
    assert math.isclose(missing(scheme, normal(1), steps=20), 0.95, rel_tol=0.005)


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


@pytest.mark.parametrize("scheme", [RandomK(0.1), RandomBlock(0.1)])
def test_what_is_not_finite_is_seen_though_it_is_not_drawn(scheme: Scheme) -> None:
    x = normal(0, 1000)
    x[123] = math.inf
    mean = Simulation(scheme, {"p": (1000,)}, world_size=2).step([x, normal(1, 1000)])[0]
    assert mean.isnan().all()


# ---- top-k in two phases


def test_topk_in_two_phases_sends_as_much_on_any_number_of_ranks() -> None:
    for world_size in (2, 8):
        ranks = Simulation(TopK(0.01, pattern="two_phase"), {"p": (N,)}, world_size=world_size)
        mean = ranks.step([normal(rank) for rank in range(world_size)])[0]
        assert sum(ranks.wire_bytes) <= 2 * 8 * 0.01 * N
        assert int((mean != 0).sum()) <= 0.01 * N


# ---- aligned top-k


def _rows(world_size: int, loud: list[int]) -> list[torch.Tensor]:
    """Rows of 32; each rank's are noise that cancels, but some are large in the mean."""
    common = torch.zeros(100, 32)
    common[loud] = normal(1, 32 * len(loud)).view(-1, 32) * 3
    noise = [normal(2 + rank, 3200).view(100, 32) * 0.1 for rank in range(world_size)]
    return [(common + draw).flatten() for draw in noise]


def test_aligned_rows_are_those_that_are_large_in_the_mean() -> None:
    loud = [3, 50, 51, 77, 99]
    grads = _rows(4, loud)
    # Larger than anything on one rank, and gone in the mean: top-k would send it.
    grads[0][32 * 20 : 32 * 21] += 50.0
    grads[1][32 * 20 : 32 * 21] -= 50.0
    ranks = Simulation(AlignedTopK(0.05, row=32, directions=8), {"p": (3200,)}, world_size=4)
    mean = ranks.step(grads)[0]
    sent = mean.view(100, 32).abs().sum(1).nonzero().flatten().tolist()
    assert sent == loud
    exact = torch.stack(grads).mean(0).view(100, 32)[loud]
    torch.testing.assert_close(mean.view(100, 32)[loud], exact)


def test_aligned_rows_cost_the_same_on_any_number_of_ranks() -> None:
    for world_size in (2, 16):
        ranks = Simulation(AlignedTopK(0.05), {"p": (128 * 1000,)}, world_size=world_size)
        ranks.step([normal(rank, 128 * 1000) for rank in range(world_size)])
        assert ranks.requests == [("all_reduce", 4 * 4 * 1000), ("all_reduce", 4 * 128 * 50)]
