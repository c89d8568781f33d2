"""ACP-SGD: one collective of half of PowerSGD's bytes, and what arrives exactly."""

from __future__ import annotations

import pytest
import torch

from commhooks import ErrorFeedback, Simulation
from commhooks.schemes import ACPSGD, PowerSGD


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_bytes_are_half_of_powersgd() -> None:
    shapes = {"w": (300, 200), "b": (300,)}
    acp = Simulation(ACPSGD(4), shapes, world_size=2)
    power = Simulation(PowerSGD(4), shapes, world_size=2)
    for step in range(2):
        grads = [normal(60300, seed=9 * step + rank) for rank in range(2)]
        acp.step(grads)
        power.step(grads)
    assert acp.requests == [
        ("all_reduce", 4 * (4 * 300 + 300)),
        ("all_reduce", 4 * (4 * 200 + 300)),
    ]
    assert power.requests[:2] == [
        ("all_reduce", 4 * 4 * 300),
        ("all_reduce", 4 * (4 * 200 + 300)),
    ]


@pytest.mark.parametrize("rank", [1, 4])
def test_gradients_of_a_constant_row_space_arrive_exactly(rank: int) -> None:
    right = normal(rank, 40, seed=1)
    ranks = Simulation(ACPSGD(rank, min_compression_rate=1), {"w": (30, 40)}, world_size=3)
    for step in range(4):
        grads = [(normal(30, rank, seed=7 * step + r) @ right).flatten() for r in range(3)]
        mean = ranks.step(grads)[0]
        exact = torch.stack(grads).mean(0)
        if step >= 2:  # Q of step 1 spans the rows; step 3 needs P of step 2, of other columns
            error = (mean - exact).norm() / exact.norm()
            assert error < 1e-5 or step % 2
    assert error > 0.1, "columns change each step: P of the step before does not span them"


def test_a_constant_gradient_is_approximated_as_well_as_its_rank_allows() -> None:
    values = 2.0 ** -torch.arange(30)
    left, right = (torch.linalg.qr(normal(n, 30, seed=n))[0] for n in (60, 50))
    grad = (left * values @ right.T).flatten()
    ranks = Simulation(ACPSGD(4), {"w": (60, 50)}, world_size=1)
    for _ in range(12):
        mean = ranks.step([grad])[0]
    best = values[4:].norm() / values.norm()
    assert (mean - grad).norm() / grad.norm() < 1.01 * best


def test_feedback_makes_up_for_the_rank() -> None:
    grads = [normal(60 * 50, seed=rank) for rank in range(2)]
    ranks = Simulation(ErrorFeedback(ACPSGD(2)), {"w": (60, 50)}, world_size=2)
    steps = 300
    applied = sum(ranks.step(grads)[0] for _ in range(steps)) / steps
    exact = torch.stack(grads).mean(0)
    assert (applied - exact).norm() / exact.norm() < 0.15
