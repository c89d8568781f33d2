"""EDEN: its levels, its variance, its lack of bias, its bits."""

from __future__ import annotations

import math

import pytest
import torch

from commhooks import Eden, Simulation
from commhooks.schemes.eden import _levels
from tests.unit.test_quantized import DRAWS, error_of


@pytest.mark.parametrize(
    ("bits", "levels"),
    [(1, [0.7979]), (2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152])],
)
def test_levels_are_those_of_lloyd_and_max(bits: int, levels: list[float]) -> None:
    found = _levels(bits, torch.device("cpu"))
    torch.testing.assert_close(found[2 ** (bits - 1) :], torch.tensor(levels), atol=5e-4, rtol=0)
    torch.testing.assert_close(found, -found.flip(0), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("bits", "variance"), [(1, 0.571), (2, 0.1325), (3, 0.0355), (4, 0.0094)])
@pytest.mark.parametrize("draw", DRAWS)
def test_the_variance_does_not_depend_on_the_gradient(bits, variance, draw):
    x = draw(torch.Generator().manual_seed(0), 2**18)
    codec = Eden(bits, block=2048, pattern="all_gather")
    mean = Simulation(codec, {"p": tuple(x.shape)}, world_size=1).step([x])[0]
    assert math.isclose(error_of(mean, x), variance, rel_tol=0.05)


def test_the_mean_over_rotations_is_the_gradient() -> None:
    # The worst vector there is for a rotation: one entry, all others zero.
    x = torch.zeros(1024)
    x[5] = 1.0
    draws = 4000
    ranks = Simulation(Eden(1, 128, pattern="all_gather"), {"p": (1024,)}, world_size=1)
    mean = sum(ranks.step([x])[0] for _ in range(draws)) / draws
    # Of one non-zero entry, rotated ones are all of one magnitude: exact. Another is not.
    torch.testing.assert_close(mean, x, atol=1e-5, rtol=0)
    y = torch.linspace(-1, 3, 1024) ** 3
    ranks = Simulation(Eden(1, 128, pattern="all_gather"), {"p": (1024,)}, world_size=1)
    found = [ranks.step([y])[0] for _ in range(draws)]
    error = (sum(found) / draws - y).norm()
    spread = float(sum((one - y).square().sum() for one in found) / draws) ** 0.5
    assert error < 1.5 * spread / draws**0.5


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bits_on_the_wire(bits: int) -> None:
    n = 10**5
    ranks = Simulation(Eden(bits), {"p": (n,)}, world_size=4)
    ranks.step([torch.randn(n) for _ in range(4)])
    assert ranks.requests[0][1] * 8 / n <= bits * 1.05 + 32 / 1024 * 1.05


@pytest.mark.parametrize(("settings", "words"), [({"bits": 5}, "1 to 4"), ({"block": 64}, "128")])
def test_settings_are_checked(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Eden(**settings)
