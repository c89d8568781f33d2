"""Integers of a shared scale: codes cannot wrap, and the scale follows the gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from commhooks import ErrorFeedback, Scheme, Simulation
from commhooks.research.baselines import GlobalQSGD, IntSGD
from tests.unit.references import rank_gradients

N = 5000
random_gradients = partial(rank_gradients, numel=N)


def ranks_of(scheme: Scheme, world_size: int) -> Simulation:
    return Simulation(scheme, {"a": (N - 8,), "b": (2, 4)}, world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 16, 127])
@pytest.mark.parametrize("scheme", [GlobalQSGD(), IntSGD(precision=100.0)])
def test_the_sum_of_codes_never_wraps(scheme: Scheme, world_size: int) -> None:
    # All ranks at the maximum: Global-QSGD's 127 / n levels, rounded up on each, would wrap.
    x = torch.ones(N)
    ranks = ranks_of(scheme, world_size)
    for _ in range(20):
        mean = ranks.step([x] * world_size)[0]
        assert (mean > 0).all()


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_error_is_that_of_the_levels_left(world_size: int) -> None:
    grads = random_gradients(world_size, 0)
    exact, levels = torch.stack(grads).mean(0), 127 // world_size
    largest = torch.stack([g.abs() for g in grads]).amax(0).split(256)
    scale = torch.cat([part.amax().expand(len(part)) for part in largest]) / levels
    for scheme, worst in ((GlobalQSGD(), 1.0), (GlobalQSGD(stochastic=False), 0.5)):
        error = (ranks_of(scheme, world_size).step(grads)[0] - exact).abs()
        assert (error <= worst * scale + 1e-6).all()


def test_a_byte_an_entry_travels() -> None:
    ranks = ranks_of(GlobalQSGD(block=1024), 4)
    ranks.step(random_gradients(4, 0))
    assert ranks.requests == [("all_reduce", 4 * 5), ("all_reduce", N)]
    ranks = ranks_of(IntSGD(), 4)
    for step in range(2):
        ranks.step(random_gradients(4, step))
    assert ranks.requests == [("all_reduce", 4 * N), ("all_reduce", N + 1)]


def test_adaptive_levels_are_as_in_the_paper() -> None:
    """alpha = precision sqrt(d) / sqrt(2 n r), r an average of past means' squares."""
    world_size, precision, decay = 2, 4.0, 0.9
    ranks = ranks_of(IntSGD(precision, decay), world_size)
    r = 0.0
    for step in range(4):
        mean = ranks.step(random_gradients(world_size, step))[0]
        if step:
            alpha = precision * (N / (2 * world_size * r)) ** 0.5
            units = mean * alpha * world_size
            assert (units - units.round()).abs().max() < 1e-3
        square = float(mean.double().square().sum())
        r = decay * r + (1 - decay) * square if step else square
        stored = [v for k, _, v in ranks.engines[0].memory.items() if k == "intsgd.norm"]
        assert sum(map(float, stored)) == pytest.approx(r, rel=1e-4)


def test_a_sudden_gradient_is_clipped_and_then_followed() -> None:
    ranks = ranks_of(IntSGD(decay=0.0), 2)
    ranks.step(random_gradients(2, 0))
    sudden = [[1e4 * grad for grad in random_gradients(2, step)] for step in range(1, 8)]
    norms = [float(ranks.step(grads)[0].norm()) for grads in sudden]
    exact = 1e4 * (N / 2) ** 0.5
    assert norms[0] < 0.1 * exact
    assert norms[-1] == pytest.approx(exact, rel=0.2)


def test_from_zero_gradients_there_is_a_way_back() -> None:
    ranks = ranks_of(IntSGD(decay=0.0), 2)
    for _ in range(3):
        assert not ranks.step([torch.zeros(N)] * 2)[0].any()
    for step in range(60):
        mean = ranks.step(random_gradients(2, step))[0]
    assert float(mean.norm()) > 0.5 * (N / 2) ** 0.5


def test_clipped_parts_wait_in_the_residual() -> None:
    ranks = ranks_of(ErrorFeedback(IntSGD(decay=0.0)), 2)
    applied = total = torch.zeros(N)
    for step in range(6):
        grads = [100.0**step * grad for grad in random_gradients(2, step)]
        total = total + torch.stack(grads).mean(0)
        applied = applied + ranks.step(grads)[0]
    kept = (ranks.memory(0) + ranks.memory(1)) / 2
    assert kept.norm() > 0.5 * total.norm()
    torch.testing.assert_close(
        applied + kept, total, rtol=1e-4, atol=float(total.abs().max()) * 1e-5
    )


@pytest.mark.parametrize("world_size", [63, 64])
def test_a_residual_stays_below_the_gradient_on_any_number_of_ranks(world_size: int) -> None:
    ranks = Simulation(ErrorFeedback(GlobalQSGD()), {"a": (256,)}, world_size=world_size)
    grads = random_gradients(world_size, 0, numel=256)
    largest = max(float(grad.abs().max()) for grad in grads)
    for _ in range(12):
        ranks.step(grads)
    assert max(float(ranks.memory(rank).abs().max()) for rank in range(world_size)) < largest
