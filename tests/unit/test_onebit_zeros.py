"""One bit where most entries are exact zeros: what its page says of the residual."""

from __future__ import annotations

import pytest
import torch

from commhooks import Simulation

NUMEL = 2048


def residual_of(share: float, *, rotate: bool, block: int) -> float:
    """|e| / |g| after 300 steps of one gradient of ones and zeros, on two ranks."""
    grad = torch.zeros(NUMEL)
    grad[
        torch.randperm(NUMEL, generator=torch.Generator().manual_seed(7))[: int(NUMEL * share)]
    ] = 1
    ranks = Simulation("onebit", {"p": (NUMEL,)}, world_size=2, rotate=rotate, block=block)
    for _ in range(300):
        ranks.step([grad, grad])
    return float(ranks.memory(0).norm() / grad.norm())


@pytest.mark.parametrize("share", [1 / 4, 1 / 16, 1 / 32])
def test_the_residual_of_zeros_grows_with_one_over_their_share(share: float) -> None:
    # Zeros swing between 0 and the mean S of |c|, and a gradient of 1 drains where S = 1: then
    # (1 - p) S / 2 + p |c| = S, so that |c| is (1 + p) / (2 p).
    assert residual_of(share, rotate=False, block=2048) == pytest.approx(1 / (2 * share), rel=0.2)


@pytest.mark.parametrize("share", [1.0, 1 / 16, 1 / 256])
def test_rotated_blocks_keep_the_residual_small_whatever_is_zero(share: float) -> None:
    assert residual_of(share, rotate=True, block=1024) < 2.5
