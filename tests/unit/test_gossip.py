"""The scheme "gossip": which ranks average with each other in a step, and its formula."""

from __future__ import annotations

import pytest
import torch

from commhooks import Simulation
from commhooks.schemes.gossip import partner_of
from tests.unit.references import mean, rank_gradients

N = 300
world_sizes = pytest.mark.parametrize("world_size", range(1, 9))


@world_sizes
def test_partners_are_each_other_s(world_size: int) -> None:
    for step in range(3 * world_size):
        partners = [partner_of(rank, step, world_size) for rank in range(world_size)]
        assert [partners[partner] for partner in partners] == list(range(world_size))
        resting = sum(partner == rank for rank, partner in enumerate(partners))
        assert resting == world_size % 2


@world_sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_law_holds_bit_for_bit(world_size: int, dtype: torch.dtype) -> None:
    """t = (s + g) / 2 + (s' + g') / 2 on both, and t - s is given."""
    wide = torch.promote_types(dtype, torch.float32)
    ranks = Simulation("gossip", {"a": (100,), "b": (20, 10)}, world_size=world_size)
    sums = [torch.zeros(N, dtype=wide) for _ in range(world_size)]
    for step in range(6):
        grads = [grad.to(dtype) for grad in rank_gradients(world_size, step, N)]
        halves = [(s + g) / 2 for s, g in zip(sums, grads, strict=True)]
        for rank, given in enumerate(ranks.step(grads)):
            partner = partner_of(rank, step, world_size)
            new = halves[rank] + halves[partner]
            wanted = grads[rank] if partner == rank else (new - sums[rank]).to(dtype)
            assert torch.equal(given, wanted)
            assert torch.equal(ranks.memory(rank, "gossip.sum").to(wide), new)
            sums[rank] = new


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_a_gradient_reaches_all_of_2_to_the_k_ranks_alike_in_k_steps(bits: int) -> None:
    world_size = 2**bits
    ranks = Simulation("gossip", {"p": (N,)}, world_size=world_size)
    grads = rank_gradients(world_size, 0, N)
    total = [torch.zeros(N, dtype=torch.float64) for _ in range(world_size)]
    for step in range(bits):
        given = ranks.step([grad if step == 0 else torch.zeros(N) for grad in grads])
        total = [so_far + more for so_far, more in zip(total, given, strict=True)]
    sums = [ranks.memory(rank, "gossip.sum") for rank in range(world_size)]
    assert all(torch.equal(sum, sums[0]) for sum in sums)
    for tensor in (sums[0], *total):
        torch.testing.assert_close(tensor.double(), mean(grads), rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 9, 12, 13, 24])
def test_what_differs_about_halves_in_a_step(world_size: int) -> None:
    """The largest factor that 24 steps leave of any difference, from all ranks' weights."""
    weights = torch.eye(world_size, dtype=torch.float64)
    for step in range(24):
        partners = [partner_of(rank, step, world_size) for rank in range(world_size)]
        weights = (weights + weights[partners]) / 2
    left = float(torch.linalg.matrix_norm(weights - 1 / world_size, 2))
    assert left ** (1 / 24) < 0.6


def test_a_cast_rounds_no_sum() -> None:
    plain = Simulation("gossip", {"p": (N,)}, world_size=2)
    cast = Simulation("gossip", {"p": (N,)}, world_size=2, wire_dtype="bf16")
    for step in range(3):
        grads = rank_gradients(2, step, N)
        assert torch.equal(plain.step(grads)[0], cast.step(grads)[0])


def test_one_message_of_the_gradient_s_size_travels() -> None:
    ranks = Simulation("gossip", {"p": (N,)}, world_size=8)
    ranks.step(rank_gradients(8, 0, N))
    assert ranks.requests == [("all_gather", 4 * N)]
    assert ranks.wire_bytes == [4 * N]
    resting = Simulation("gossip", {"p": (N,)}, world_size=3)
    resting.step(rank_gradients(3, 0, N))
    assert resting.wire_bytes == [0]
