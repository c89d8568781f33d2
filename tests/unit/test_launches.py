"""How many kernels schemes launch on a GPU for a bucket; nothing in them waits for it."""

from __future__ import annotations

import pytest

import commhooks
from experiments.fake_gpu import counts_of

SHAPES = [(1000, 1000), (1000,), (64, 3, 3, 3)]


@pytest.mark.parametrize("name", ["qsgd", "terngrad"])
def test_random_levels_are_drawn_on_the_device(name: str) -> None:
    counts = counts_of(commhooks.make(name), SHAPES, world_size=2)
    assert sum(counts.kernels.values()) == 3  # to encode, and to decode two payloads
