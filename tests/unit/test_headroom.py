"""``headroom``: what measured steps of four kinds of communication say, in numbers and words."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks.predict.headroom import Headroom
from commhooks.predict.turns import KINDS, Facts, Travel

FACTS = Facts(2, "gloo", "cpu", 46_000_000, 3, 6)
# Three buckets of 10 ms each, of which one value takes 0.5 ms; the last begins at 0.
TRAVEL = [Travel(-0.020, 0.010, 0.0005), Travel(-0.008, 0.010, 0.0005), Travel(0.0, 0.010, 0.0005)]


def measured(
    dense: float,
    bf16: float,
    one: float,
    noop: float,
    *,
    noise: float = 0.001,
    travel: Sequence[Travel] = TRAVEL,
) -> Headroom:
    """Returns the headroom of steps of so many seconds, with this share of noise."""
    draw = random.Random(0)
    means = dict(zip(KINDS, (dense, bf16, one, noop), strict=True))
    turns = [
        {kind: [draw.gauss(mean, noise * mean) for _ in range(5)] for kind, mean in means.items()}
        for _ in range(FACTS.turns)
    ]
    return Headroom.of(turns, FACTS, travel)


@pytest.mark.parametrize(
    ("seconds", "verdict", "words"),
    [
        ((0.100, 0.101, 0.0995, 0.099), "hidden", "Do not compress. Backward hides"),
        ((0.120, 0.121, 0.1195, 0.100), "latency", "What is exposed is latency"),
        ((0.120, 0.1005, 0.100, 0.099), "bf16", "Use bf16, and do not compress more"),
        ((0.200, 0.150, 0.102, 0.100), "compress", "Compression may pay"),
    ],
)
def test_the_verdict_follows_from_what_can_be_saved(
    seconds: tuple[float, float, float, float], verdict: str, words: str
) -> None:
    found = measured(*seconds)
    assert found.verdict == verdict
    assert words in str(found)
    assert found.exposed.seconds == pytest.approx(seconds[0] - seconds[3], abs=2e-3)
    assert found.beside_dense.seconds == pytest.approx(seconds[0] - seconds[2], abs=2e-3)
    assert found.beside_bf16.seconds == pytest.approx(seconds[1] - seconds[2], abs=2e-3)


def test_what_is_within_the_noise_is_nothing() -> None:
    # 8 % of a step exposed, with steps that scatter by 30 %.
    assert measured(0.108, 0.108, 0.104, 0.100, noise=0.3).verdict == "hidden"
    assert measured(0.108, 0.104, 0.100, 0.100, noise=0.003).verdict == "compress"


def test_steps_get_shorter_with_the_ratio_down_to_one_value_per_bucket() -> None:
    found = measured(0.115, 0.108, 0.1005, 0.100, noise=0)
    steps = [found.step_s(ratio) for ratio in (1, 2, 4, 8, 100, 1e6)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == pytest.approx(0.115)
    assert steps[-1] == pytest.approx(0.1005, abs=1e-6)
    # The last bucket is under way alone when the ratio is 2: 5.25 of 12 ms are left of the tail
    # (12: the second bucket ends 2 ms after the last one has begun, and 0.5 is the least).
    assert steps[1] == pytest.approx(0.1005 + (0.115 - 0.1005) * (5.25 - 0.5) / (12 - 0.5))


def test_the_ratio_at_which_a_scheme_breaks_even() -> None:
    found = measured(0.115, 0.108, 0.1005, 0.100, noise=0)
    for cost in (0.0, 0.002, 0.005):
        ratio = found.break_even(cost)
        assert ratio is not None
        assert found.step_s(ratio) + cost < 0.115
        assert found.step_s(ratio / 1.03) + cost >= 0.115 * (1 - 1e-9)
        above = found.break_even(cost, over="bf16")
        assert above is not None
        assert above > ratio
    assert found.break_even(0.1) is None  # more than can be saved
    hides = found.ratio_to_hide()
    assert found.step_s(hides) <= 0.115 - 0.9 * found.beside_dense.seconds + 1e-12
    assert found.step_s(hides / 1.03) > 0.115 - 0.9 * found.beside_dense.seconds


def test_a_scheme_that_costs_more_than_it_saves_loses_in_words() -> None:
    # bf16 saves nearly all, so that a ratio of 2 is not faster.
    text = str(measured(0.200, 0.105, 0.100, 0.060))
    assert "loses" in text
    assert "to beat bf16" in text
    assert "breaks even" in text


def test_all_numbers_are_saved(tmp_path: Path) -> None:
    found = measured(0.200, 0.150, 0.102, 0.100)
    found.save(tmp_path / "headroom.json")
    saved: dict[str, Any] = json.loads((tmp_path / "headroom.json").read_text())
    assert saved["verdict"] == "compress"
    assert saved["dense"]["median_s"] == found.dense.median_s
    assert saved["step_s_by_ratio"]["4"] == found.step_s(4)
    assert len(saved["travel"]) == 3


@pytest.mark.parametrize("steps", [9, 10.5, True, "30"])
def test_a_wrong_number_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="10 or more"):
        commhooks.headroom(nn.Linear(2, 2), lambda: None, steps=steps)


def test_a_module_without_ranks_is_refused() -> None:
    with pytest.raises(commhooks.Error, match="DistributedDataParallel"):
        commhooks.headroom(nn.Linear(2, 2), lambda: torch.zeros(1))
