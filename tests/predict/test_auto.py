"""``register(model, "auto")``: the race of candidates, and one decision of all ranks."""

from __future__ import annotations

import copy
import math
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.auto import AutoHook
from commhooks.auto._trials import (
    Candidate,
    CandidateTiming,
    CandidateTimings,
    Stage,
    Trials,
    chosen,
)
from commhooks.core import Bucket, Scheme
from commhooks.core._bucket import SchemeExchange
from commhooks.core._dense import Dense
from commhooks.errors import MismatchError, OptionError
from commhooks.hook import HookState
from commhooks.predict._advise import made_candidates
from commhooks.wrappers._base import Wrapper
from commhooks.wrappers._cast import Cast
from commhooks.wrappers._feedback import unwrap_flush
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core.exchange import _clocks as clocks
from tests.tools.fake_torch import pretend
from tests.tools.harness import on_ranks
from tests.tools.training import equal_on_all_ranks, gradients, mlp


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


STEPS = 100


@contextmanager
def _slow_line(seconds_per_byte: float) -> Iterator[None]:
    """Makes every message take longer, as on a slow line."""
    from ddp_core import AllGather, AllReduce, AllToAll

    def slowed(kind: type[Any]) -> Any:
        issue = kind.issue

        def slow(request: Any, group: Any) -> Any:
            time.sleep(request.wire_nbytes(group.size()) * seconds_per_byte)
            return issue(request, group)

        return mock.patch.object(kind, "issue", slow)

    with slowed(AllReduce), slowed(AllGather), slowed(AllToAll):
        yield


@pytest.mark.parametrize("kind", ["core", "torch"])
@on_ranks(2)
def test_a_slow_line_gets_a_scheme_within_the_budget_of_error(rank: int, kind: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = mlp(256, 2)
    ddp = (CoreDDP if kind == "core" else DistributedDataParallel)(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    hook: Any = commhooks.register(ddp, "auto", candidates=["int8", "topk"], measure_steps=3)
    with _slow_line(1.5e-7):  # 0.5 MB in 80 ms
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            if hook._trials.over:
                break
    assert "int8" in str(hook.scheme), hook.plan  # top-k is beyond the budget
    assert "auto runs int8" in hook.plan
    assert equal_on_all_ranks(torch.tensor(hook.step), *model.parameters())


SLEEPS = [0.0]  # seconds, of this process


@dataclass(frozen=True)
class Slow(Wrapper):
    """Sleeps before it encodes."""

    scheme: Scheme

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        time.sleep(SLEEPS[0])
        return (yield from self.scheme.exchange(bucket))


# From which stage on all candidates but none are slow, and the line's seconds per byte.
NONE_IS_BEST = {"slow when tried": (Stage.FIRST, 0.0), "slow once chosen": (Stage.VALIDATE, 1e-7)}


@pytest.mark.slow
@pytest.mark.parametrize("case", NONE_IS_BEST)
@on_ranks(2)
def test_where_no_scheme_is_faster_none_runs_on_all_ranks(rank: int, case: str) -> None:
    begins, seconds_per_byte = NONE_IS_BEST[case]
    ddp = CoreDDP(mlp(256, 2))
    dense_in_16_bits = Cast.exchange  # "bf16", which always takes part

    def slow_cast(scheme: Any, bucket: Bucket) -> SchemeExchange:
        time.sleep(SLEEPS[0])
        return (yield from dense_in_16_bits(scheme, bucket))

    slow = {"int8": Slow(commhooks.make("int8"))}
    raced = []
    with mock.patch.object(Cast, "exchange", slow_cast), _slow_line(seconds_per_byte):
        hook: Any = commhooks.register(ddp, "auto", candidates=slow, measure_steps=3)
        while not hook.decided and hook.step < 300:  # races go on while times are noisy
            SLEEPS[0] = 0.15 if SLEEPS[0] or hook._trials._stage is begins else 0.0
            torch.manual_seed(10 * hook.step + rank)
            ddp.zero_grad()
            ddp(torch.randn(8, 256)).square().mean().backward()
            raced.append(str(hook.scheme))
    SLEEPS[0] = 0.0
    assert "auto runs none" in hook.plan
    assert hook.plan in hook.summary()
    assert unwrap_flush(hook.scheme) == commhooks.make("none")
    assert hook.plan_state() == '{"undecided": false}'
    assert any("Slow" in scheme for scheme in raced)
    assert equal_on_all_ranks(gradients(ddp))
    there: list[Any] = [None] * 2
    dist.all_gather_object(there, (hook.plan, raced, hook.step))
    assert there[0] == there[1]


def _candidate(name: str, error: float = 0.0) -> Candidate:
    return Candidate(name, Dense(), error)


def test_the_fastest_is_kept_unless_dense_or_a_more_exact_one_is_as_fast() -> None:
    fast, exact, dense = _candidate("a", 0.1), _candidate("b", 0.01), _candidate("none")
    assert chosen([(1.0, fast), (1.5, exact), (2.0, dense)], 2.0) == (1.0, fast)
    assert chosen([(1.0, fast), (1.005, exact), (2.0, dense)], 2.0) == (1.005, exact)
    assert chosen([(1.0, fast), (1.015, exact), (2.0, dense)], 2.0) == (1.0, fast)
    assert chosen([(1.99, fast)], 2.0) is None
    assert chosen([], 2.0) is None


def _trials(device: str = "cpu") -> Trials:
    hook = mock.Mock(step=0)
    hook.target.device = torch.device(device)
    return Trials(hook, mock.Mock(), [_candidate("none")], steps=2)


def _with_ranks(*of_ranks: Any) -> Trials:
    """Trials that hear these values of their ranks."""
    trials = _trials()
    trials._of_all = lambda value: [*of_ranks]  # type: ignore[method-assign]
    return trials


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    trials = _with_ranks([1.0, 5.0], [3.0, 1.0])
    trials._stage = Stage.TRIAL
    trials._end_stage()
    assert trials._timings.entries[0].times == [3.0, 5.0]


def test_the_first_steps_of_a_run_do_not_count() -> None:
    trials = _with_ranks([9.0, 9.0])
    trials._end_stage()
    assert trials._stage is Stage.TRIAL
    assert trials._timings.entries[0].times == []


def test_two_steps_warm_up_and_are_not_timed() -> None:
    trials = _with_ranks([1.0])
    with mock.patch.object(trials, "_end_stage"):
        for trials._hook.step in range(6):
            trials.forward_begins()
    assert len(trials._times) == 3  # the third one on, until the last one began


def test_steps_of_a_gpu_are_timed_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend(monkeypatch)
    monkeypatch.setattr(clocks, "_clocks", {})
    trials = _trials("cuda")
    trials._of_all = lambda measure: [measure()]  # type: ignore[method-assign]
    with mock.patch.object(trials, "_try_next"):
        trials._stage = Stage.TRIAL
        for trials._hook.step in range(5):  # the host enqueues all of them at once
            trials.forward_begins()
            device.work(1000.0 * (1 + trials._hook.step))
    assert trials._timings.entries[0].times == pytest.approx([3.0, 4.0])


@on_ranks(2)
def test_ranks_that_would_race_other_candidates_raise_an_error(rank: int) -> None:
    with pytest.raises(MismatchError, match=r"(?s)candidates.*int4"):
        commhooks.register(CoreDDP(mlp()), "auto", candidates=["int4" if rank else "int8"])


def _resumed(scheme: str, *candidates: str, **options: Any) -> tuple[Any, Any]:
    """A hook, and one that takes its state and would choose among candidates."""
    hook = commhooks.register(CoreDDP(mlp()), scheme)
    again = commhooks.register(CoreDDP(mlp()), "auto", candidates=candidates)
    again.load_state_dict(hook.state_dict(gather=True), **options)
    return hook, again


@on_ranks(2)
def test_a_resumed_run_has_the_settings_that_were_chosen() -> None:
    for scheme in ("int4", "onebit", "bf16"):
        hook, again = _resumed(scheme, "int4", "onebit", "int8")
        assert again.scheme == hook.scheme
        again.switch("fp16")  # the user decides from here on
        assert "chosen by hook.switch" in again.plan


@on_ranks(2)
def test_a_saved_scheme_that_is_no_candidate_begins_the_trials() -> None:
    _, again = _resumed("topk", "int8", strict=False)
    assert not again.decided


@on_ranks(2)
def test_a_scheme_whose_uncompressed_steps_are_over_is_a_candidate_without() -> None:
    ddp = CoreDDP(mlp())
    hook = commhooks.register(ddp, "int4", start_step=2)
    for _ in range(3):
        ddp(torch.randn(4, 16)).sum().backward()
    again: Any = commhooks.register(CoreDDP(mlp()), "auto", candidates=["int4"])
    again.load_state_dict(hook.state_dict(gather=True))
    assert again.plan == "auto runs int4, as the run that was saved."
    assert again.step == 3


@on_ranks(2)
def test_a_run_that_stopped_before_the_decision_searches_anew() -> None:
    ddp = CoreDDP(mlp())
    hook: Any = commhooks.register(ddp, "auto", candidates=["int8"])
    for _ in range(4):
        ddp(torch.randn(4, 16)).sum().backward()
    ddp = CoreDDP(mlp())
    again: Any = commhooks.register(ddp, "auto", candidates=["int8"], measure_steps=2)
    again.load_state_dict(hook.state_dict(gather=True))
    assert not again._trials.over
    steps = 0
    while not again._trials.over and steps < 300:  # races go on while times are noisy
        ddp(torch.randn(4, 16)).sum().backward()
        steps += 1
    assert again._trials.over
    assert again.step - steps == 4


def _raced(*results: tuple[str, float]) -> CandidateTimings:
    race = CandidateTimings([_candidate(name) for name, _ in results])
    for _, seconds in results:
        race.add([seconds] * 8)
    return race


@pytest.mark.parametrize(("again", "kept"), [((0.9, 1.0), True), ((1.1, 1.0), False)])
def test_a_choice_that_seems_to_have_lost_is_raced_against_dense_steps(
    again: tuple[float, float], kept: bool
) -> None:
    trials = _trials()
    trials._timings = _raced(("a", 0.9), ("none", 1.0))
    trials._try_next()
    assert not trials.over
    trials._keep_or_compare_again(1.1)
    assert not trials.over
    for seconds in again:
        trials._timings.add([seconds] * 8)
        trials._try_next()
    assert trials.over
    assert (trials.choice is not None) == kept == ("auto runs a" in trials.plan)


@pytest.mark.parametrize(
    ("since", "verdict"),
    [
        (0.9, "The choice holds."),
        (1.1, "That is more than uncompressed steps took: compared once more."),
    ],
)
def test_the_plan_and_its_comparison_are_logged(since: float, verdict: str) -> None:
    trials = _trials()
    trials._timings = _raced(("a", 0.9), ("none", 1.0))
    with TestCase().assertLogs("commhooks", "INFO") as log:  # caplog is off, see pyproject.toml
        trials._try_next()
        decided = trials.plan
        trials._keep_or_compare_again(since)
    took = f"It took {1e3 * since:.1f} ms per step since."
    assert [record.getMessage() for record in log.records] == [
        decided,
        f"{decided} {took} {verdict}",
    ]
    assert decided.startswith("auto runs a: 10 % less time")
    assert "none: 1000.0 ms per step" in decided


@dataclass(frozen=True)
class Fails(Scheme):
    """Raises on any gradient."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        raise RuntimeError("on purpose")
        yield  # a generator


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": [commhooks.make("int8")]}, "a list of names, or schemes by name"),
        ({"candidates": {"a": "int8"}}, "schemes by name, got 'int8' by 'a'"),
        ({"candidates": 3}, "a list of names, or schemes by name"),
        ({"candidates": {"none": commhooks.make("int8")}}, "'none' is"),
        ({"candidates": {"bad": Fails()}}, "'bad' failed .*: on purpose"),
        ({"max_error": -1.0}, "0 or more"),
    ],
)
def test_wrong_candidates_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        AutoHook(**options)


def test_a_copy_of_the_hook_runs_the_scheme_that_ran() -> None:
    hook = AutoHook(candidates=["int8"])
    hook.switch("int8")
    for copied in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert type(copied) is HookState
        assert copied.scheme == hook.scheme


def test_a_wrong_setting_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="no average"):
        made_candidates(["noop"])
    assert math.isclose(made_candidates([])["none"].traits.error.variance, 0.0)
