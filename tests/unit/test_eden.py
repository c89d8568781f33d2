"""EDEN: its levels, its variance, its lack of bias, its bits."""

from __future__ import annotations

import math

import pytest
import torch

from commhooks import Simulation
from commhooks.schemes import Eden
from commhooks.schemes.eden import _levels
from tests.unit.test_quantized import DRAWS, error_of


@pytest.mark.parametrize(
    ("bits", "levels"), [(1, [0.7979]), (2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152])]
)
def test_levels_are_those_of_lloyd_and_max(bits: int, levels: list[float]) -> None:
    computed = _levels(bits)
    torch.testing.assert_close(computed[2 ** (bits - 1) :], torch.tensor(levels), atol=5e-4, rtol=0)
    torch.testing.assert_close(computed, -computed.flip(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("bits", "variance"), [(1, 0.571), (2, 0.1325), (3, 0.0355), (4, 0.0094)])
@pytest.mark.parametrize("draw", DRAWS)
def test_the_variance_does_not_depend_on_the_gradient(bits, variance, draw):
    x = draw(torch.Generator().manual_seed(0), 2**18)
    codec = Eden(bits, block=2048, pattern="all_gather")
    mean = Simulation(codec, {"p": tuple(x.shape)}, world_size=1).step([x])[0]
    assert math.isclose(error_of(mean, x), variance, rel_tol=0.05)


def blocks(*values: float) -> torch.Tensor:
    """64 blocks that begin with the values, and are zero otherwise."""
    x = torch.zeros(64, 1024)
    x[:, : len(values)] = torch.tensor(values)
    return x.flatten()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "values",
    # The last three: the worst found by a search over blocks of up to 16 entries at 2 to 4 bits.
    [(1, 1), (1, 1, 1), (1,) * 4, (1,) * 8, (1,) * 16, (1, 1, 0.92, 1), (1, 0.83, 1), (0, 1, 0.98)],
    ids=str,
)
def test_no_sparse_block_exceeds_the_variance(bits: int, values: tuple[float, ...]) -> None:
    x, codec = blocks(*values), Eden(bits, pattern="all_gather")
    mean = Simulation(codec, {"p": tuple(x.shape)}, world_size=1).step([x])[0]
    assert error_of(mean, x) <= codec.traits.error.variance


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_two_phases_round_twice_and_independently(world_size: int) -> None:
    """Rotated alike, half of the sum of two ranks' levels are zeros, and what is lost is biased."""
    generator = torch.Generator().manual_seed(world_size)
    grads = [torch.randn(2**18, generator=generator) for _ in range(world_size)]
    exact = torch.stack(grads).double().mean(0)
    mean = Simulation(Eden(1), {"p": (2**18,)}, world_size=world_size).step(grads)[0]
    assert math.isclose(error_of(mean, exact), 1.571**2 - 1, rel_tol=0.03)
