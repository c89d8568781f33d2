"""``register(model, "auto")`` between real processes: all ranks take one decision, and keep it."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.auto import AutoHook
from commhooks.auto._trials import Candidate, CandidateTimings, Stage, Trials, chosen
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
from tests.tools.harness import run_ranks
from tests.tools.training import mlp

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


def _train(rank: int, world_size: int, kind: str, seconds_per_byte: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model: nn.Module = mlp(256, 2)
    ddp = (CoreDDP if kind == "core" else DistributedDataParallel)(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    hook: Any = commhooks.register(ddp, "auto", candidates=["int8", "topk"], measure_steps=3)
    with _slow_line(seconds_per_byte):
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            if hook._trials.over:
                break
    return {
        "plan": hook.plan,
        "scheme": str(hook.scheme),
        "step": hook.step,
        "parameters": torch.cat(
            [parameter.detach().reshape(-1) for parameter in model.parameters()]
        ),
    }


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_a_slow_line_gets_a_scheme_within_the_budget_of_error(kind: str) -> None:
    ranks = run_ranks(_train, 2, kind, 1.5e-7)  # 0.5 MB in 80 ms
    assert "int8" in ranks[0]["scheme"], ranks[0]["plan"]  # top-k is beyond the budget
    assert "auto runs int8" in ranks[0]["plan"]
    for rank in ranks[1:]:
        assert (rank["scheme"], rank["step"]) == (ranks[0]["scheme"], ranks[0]["step"])
        assert torch.equal(rank["parameters"], ranks[0]["parameters"])


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


def _without_winner(rank: int, world_size: int, case: str) -> dict[str, Any]:
    begins, seconds_per_byte = NONE_IS_BEST[case]
    ddp = CoreDDP(mlp(256, 2))
    dense_in_16_bits = Cast.exchange  # "bf16", which always takes part

    def slow_cast(scheme: Any, bucket: Bucket) -> SchemeExchange:
        time.sleep(SLEEPS[0])
        return (yield from dense_in_16_bits(scheme, bucket))

    mock.patch.object(Cast, "exchange", slow_cast).start()
    slow = {"int8": Slow(commhooks.make("int8"))}
    hook: Any = commhooks.register(ddp, "auto", candidates=slow, measure_steps=3)
    raced = []
    with _slow_line(seconds_per_byte):
        while not hook.decided and hook.step < 300:  # races go on while times are noisy
            if hook._trials._stage is begins:
                SLEEPS[0] = 0.15
            torch.manual_seed(10 * hook.step + rank)
            ddp.zero_grad()
            ddp(torch.randn(8, 256)).square().mean().backward()
            raced.append(str(hook.scheme))
    gradients = [
        parameter.grad.reshape(-1) for parameter in ddp.parameters() if parameter.grad is not None
    ]
    return {
        "plan": hook.plan,
        "told": hook.plan in hook.summary(),
        "raced": raced,
        "scheme": unwrap_flush(hook.scheme) == commhooks.make("none"),
        "saved": hook.plan_state(),
        "step": hook.step,
        "gradients": torch.cat(gradients),
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", NONE_IS_BEST)
def test_where_no_scheme_is_faster_none_runs_on_all_ranks(case: str) -> None:
    first, second = run_ranks(_without_winner, 2, case)
    assert "auto runs none" in first["plan"], first["plan"]
    assert first["scheme"]
    assert first["told"]
    assert first["saved"] == '{"undecided": false}'
    assert any("Slow" in scheme for scheme in first["raced"])
    assert torch.equal(first.pop("gradients"), second.pop("gradients"))
    assert first == second


def _candidate(name: str, error: float = 0.0) -> Candidate:
    return Candidate(name, Dense(), error)


def test_the_fastest_is_kept_unless_dense_or_a_more_exact_one_is_as_fast() -> None:
    fast, exact, dense = _candidate("a", 0.1), _candidate("b", 0.01), _candidate("none")
    assert chosen([(1.0, fast), (1.5, exact), (2.0, dense)], 2.0) == (1.0, fast)
    assert chosen([(1.0, fast), (1.005, exact), (2.0, dense)], 2.0) == (1.005, exact)
    assert chosen([(1.0, fast), (1.015, exact), (2.0, dense)], 2.0) == (1.0, fast)
    assert chosen([(1.99, fast)], 2.0) is None
    assert chosen([], 2.0) is None


def _with_ranks(*of_ranks: Any) -> Trials:
    """Trials that hear these values of their ranks."""
    trials = Trials(mock.Mock(step=0), mock.Mock(), [_candidate("none")], steps=2)
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


def _other_candidates(rank: int, world_size: int) -> str:
    with pytest.raises(MismatchError) as caught:
        commhooks.register(CoreDDP(mlp()), "auto", candidates=["int4" if rank else "int8"])
    return str(caught.value)


def test_ranks_that_would_race_other_candidates_are_told() -> None:
    assert all("candidates" in text and "int4" in text for text in run_ranks(_other_candidates, 2))


def _resume(rank: int, world_size: int) -> tuple[str, str, int]:
    ddp = CoreDDP(mlp())
    hook = commhooks.register(ddp, "int8")
    again = commhooks.register(CoreDDP(mlp()), "auto", candidates=["int8"])
    again.load_state_dict(hook.state_dict(gather=True))
    scheme = str(again.scheme)
    again.switch("bf16")  # the user decides from here on
    return scheme, again.plan, again.step  # type: ignore[attr-defined]


def test_a_resumed_run_goes_on_with_the_scheme_that_was_chosen() -> None:
    for scheme, plan, _ in run_ranks(_resume, 2):
        assert "int8" in scheme
        assert "chosen by hook.switch" in plan


def _resume_each(rank: int, world_size: int) -> list[tuple[str, str]]:
    results = []
    for scheme in ("int4", "onebit", "bf16"):
        hook = commhooks.register(CoreDDP(mlp()), scheme)
        again = commhooks.register(CoreDDP(mlp()), "auto", candidates=["int4", "onebit", "int8"])
        again.load_state_dict(hook.state_dict(gather=True))
        results.append((scheme, str(again.scheme == hook.scheme)))
    return results


def test_a_resumed_run_has_the_settings_that_were_chosen() -> None:
    for results in run_ranks(_resume_each, 2):
        assert [same for _, same in results] == ["True"] * 3, results


def _resume_undecided(rank: int, world_size: int) -> tuple[bool, int, bool]:
    ddp = CoreDDP(mlp())
    hook: Any = commhooks.register(ddp, "auto", candidates=["int8"])
    for _ in range(4):
        ddp(torch.randn(4, 16)).sum().backward()
    ddp = CoreDDP(mlp())
    again: Any = commhooks.register(ddp, "auto", candidates=["int8"], measure_steps=2)
    again.load_state_dict(hook.state_dict(gather=True))
    before = again._trials.over
    steps = 0
    while not again._trials.over and steps < 300:  # races go on while times are noisy
        ddp(torch.randn(4, 16)).sum().backward()
        steps += 1
    return before, again.step - steps, again._trials.over


def test_a_run_that_stopped_before_the_decision_searches_anew() -> None:
    for before, step, after in run_ranks(_resume_undecided, 2):
        assert not before
        assert step == 4
        assert after


def _raced(*results: tuple[str, float]) -> CandidateTimings:
    race = CandidateTimings([_candidate(name) for name, _ in results])
    for _, seconds in results:
        race.add([seconds] * 8)
    return race


@pytest.mark.parametrize(("again", "kept"), [((0.9, 1.0), True), ((1.1, 1.0), False)])
def test_a_choice_that_seems_to_have_lost_is_raced_against_dense_steps(
    again: tuple[float, float], kept: bool
) -> None:
    trials = Trials(mock.Mock(step=0), mock.Mock(), [_candidate("none")], steps=2)
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
    trials = Trials(mock.Mock(step=0), mock.Mock(), [_candidate("none")], steps=2)
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


def _resume_another(rank: int, world_size: int) -> tuple[bool, str]:
    hook = commhooks.register(CoreDDP(mlp()), "topk")
    again: Any = commhooks.register(CoreDDP(mlp()), "auto", candidates=["int8"])
    again.load_state_dict(hook.state_dict(gather=True), strict=False)
    return again.decided, again.plan


def test_a_saved_scheme_that_is_no_candidate_begins_the_trials() -> None:
    assert not run_ranks(_resume_another, 2)[0][0]


def test_a_wrong_setting_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="no average"):
        made_candidates(["noop"])
    assert math.isclose(made_candidates([])["none"].traits.error.variance, 0.0)
