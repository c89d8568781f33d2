"""The race of ``"auto"``: noise does not decide, and what is clearly slower stops running."""

from __future__ import annotations

import random

import pytest

from commhooks.auto._trials import Candidate, CandidateTiming, CandidateTimings
from commhooks.core._dense import Dense


def _race(*names: str) -> CandidateTimings:
    return CandidateTimings([Candidate(name, Dense(), 0.0) for name in names])


def _run(seconds: dict[str, float], noise: float, seed: int, steps: int = 8) -> CandidateTimings:
    draw, race = random.Random(seed), _race(*seconds)
    while (entry := race.next()) is not None:
        # A busy machine: whole stretches of steps are slower, whoever runs then.
        slow = 1 + noise * draw.random()
        times = [
            seconds[entry.candidate.name] * slow * (1 + noise * draw.random()) for _ in range(steps)
        ]
        race.add(times)
    return race


def test_without_noise_one_round_decides() -> None:
    race = _run({"a": 1.0, "b": 1.005, "c": 1.015}, 0.0, 0)
    assert [len(entry.times) for entry in race.entries] == [8, 8, 8]
    assert [entry.runs for entry in race.entries] == [True, True, False]


def test_close_ones_run_again_under_noise_and_slow_ones_do_not() -> None:
    race = _run({"a": 1.0, "b": 1.05, "c": 3.0}, 0.3, 0)
    a, b, c = race.entries
    assert len(a.times) == len(b.times) > 8
    assert len(c.times) == 8


def test_the_order_of_turns_is_reversed_in_every_second_round() -> None:
    race, order = _race("a", "b"), []
    for _ in range(4):
        entry = race.next()
        assert entry is not None
        order.append(entry.candidate.name)
        race.add([1.0, 2.0])  # too few steps to know anything
    assert order == ["a", "b", "b", "a"]


def test_the_error_of_a_median_shrinks_with_the_number_of_steps() -> None:
    candidate = Candidate("a", Dense(), 0.0)
    few, many = (
        CandidateTiming(candidate, [1.0, 1.1, 1.2, 1.3]),
        CandidateTiming(candidate, [1.0, 1.1, 1.2, 1.3] * 16),
    )
    assert many.deviation == pytest.approx(few.deviation / 4)


def test_with_few_steps_only_what_takes_twice_as_long_is_known_to_be_slower() -> None:
    race = _race("fast", "near", "slow")
    for times in ([1.0, 1.0], [1.9, 1.9], [2.5, 2.5]):
        race.add(times)
    assert [entry.runs for entry in race.entries] == [True, True, False]


def test_noise_does_not_decide() -> None:
    """With 20 % of noise, of two that differ by 10 % the faster one wins, not so in one round."""
    names = {"slower": 1.1, "faster": 1.0}
    wrong = single = 0
    for seed in range(40):
        race = _run(names, 0.2, seed)
        slower, faster = race.entries
        wrong += slower.median < faster.median
        single += sorted(slower.times[:8])[4] < sorted(faster.times[:8])[4]
    assert wrong <= 1 < single


def test_a_race_that_noise_never_lets_end_ends_after_six_rounds() -> None:
    races = [_run({"a": 1.0, "b": 1.0}, 2.0, seed) for seed in range(40)]
    assert max(len(race.entries[0].times) for race in races) == 6 * 8
