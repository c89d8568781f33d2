"""The arithmetic of weights, without other ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.reducer.weights import Weights, checked_weight


def of_ranks(kind: Any, totals: list[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The factor of each rank that has counted this much in one pass."""
    rows = [[1.0, total] for total in totals]
    monkeypatch.setattr("ddp_core.reducer.weights.backward_number", lambda: 5)
    factors = []
    for total in totals:
        launcher: Any = SimpleNamespace(group=SimpleNamespace(size=lambda: len(rows)), step=7)
        weights = Weights(kind, [], launcher, torch.device("cpu"))
        monkeypatch.setattr(weights, "_received", lambda: rows)
        weights.give(total)
        weights.gradient_came()
        assert weights._total == total
        factors.append(weights.factor())
    return factors


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 7, 64, 1000])
def test_equal_weights_have_the_factor_one(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(ranks)
    for weight in (1, 3, 0.1, 1e-300, 1e300, *(draw.random() for _ in range(5))):
        if weight * ranks < 1e308:
            assert set(of_ranks("mean", [weight] * ranks, monkeypatch)) == {1.0}


def test_factors_average_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = of_ranks("mean", [0, 1, 5, 34], monkeypatch)
    assert factors == [0.0, 0.1, 0.5, 3.4]
    assert of_ranks("sum", [0, 1, 5, 34], monkeypatch) == [0.0, 0.1, 0.1, 0.1]


def test_no_weight_at_all_is_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="weights of all ranks are 0 in step 7"):
        of_ranks("sum", [0, 0], monkeypatch)


@pytest.mark.parametrize("value", [0, 3, 0.5, torch.tensor(3), torch.tensor([2.5])])
def test_a_weight_is_one_number(value: Any) -> None:
    assert checked_weight(value) == float(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, torch.tensor(float("nan"))])
def test_a_weight_is_finite_and_not_negative(value: Any) -> None:
    with pytest.raises(ValueError, match="infinity"):
        checked_weight(value)


@pytest.mark.parametrize("value", ["3", None, True, 1j, torch.ones(2), torch.tensor(1j)])
def test_a_weight_is_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match="takes"):
        checked_weight(value)
