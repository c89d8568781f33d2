"""``register(model, "auto")`` between real processes: all ranks take one decision, and keep it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any
from unittest import TestCase, mock

import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.core import Bucket, Scheme
from commhooks.core.bucket import SchemeExchange
from commhooks.core.dense import Dense
from commhooks.core.traits import Traits
from commhooks.predict.advise import CAPS_MB, Option, made_candidates, scheme_of
from commhooks.predict.race import Race
from commhooks.predict.recorded import Recorder
from commhooks.predict.search import Search, Stage, _sizes, chosen, promising
from commhooks.predict.split import Split, split_scheme
from commhooks.predict.step import Step
from commhooks.wrappers.base import Wrapper
from commhooks.wrappers.feedback import without_flush
from ddp_core import DistributedDataParallel as CoreDDP
from tests.distributed.harness import run_ranks
from tests.distributed.training import mlp

STEPS = 100
NO_STEP = Step(1.0, 1.0, 0.0, 0.0, 0, 0.0, 0)


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
    hook: Any = commhooks.register(
        ddp, "auto", candidates=["int8", "topk"], measure_steps=3, link_s=0.2
    )
    with _slow_line(seconds_per_byte):
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.manual_seed(10 * step + rank)
            ddp(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            if hook._search.over:
                break
    return {
        "plan": hook.plan,
        "scheme": str(hook.scheme),
        "step": hook.step,
        "parameters": torch.cat([one.detach().reshape(-1) for one in model.parameters()]),
    }


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_a_slow_line_gets_a_scheme_within_the_budget_of_error(kind: str) -> None:
    ranks = run_ranks(_train, 2, kind, 1.5e-7)  # 0.5 MB in 80 ms
    assert "int8" in ranks[0]["scheme"], ranks[0]["plan"]  # top-k is beyond the budget
    assert "auto runs int8" in ranks[0]["plan"]
    for one in ranks[1:]:
        assert (one["scheme"], one["step"]) == (ranks[0]["scheme"], ranks[0]["step"])
        assert torch.equal(one["parameters"], ranks[0]["parameters"])


SLEEPS = [0.0]  # seconds, of this process


@dataclass(frozen=True)
class Slow(Wrapper):
    """Sleeps before it encodes."""

    scheme: Scheme

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        time.sleep(SLEEPS[0])
        return (yield from self.scheme.exchange(bucket))


# From which stage on all candidates but none are slow, for how long, and the line's seconds per
# byte: on a slow line they are predicted to win, and are tried.
NONE_IS_BEST = {
    "predicted to be slow": (Stage.DENSE, 0.02, 0.0),
    "slow when tried": (Stage.TRIAL, 0.15, 1e-7),
    "slow once chosen": (Stage.KEPT, 0.15, 1e-7),
}


def _without_winner(rank: int, world_size: int, case: str) -> dict[str, Any]:
    begins, sleep, seconds_per_byte = NONE_IS_BEST[case]
    ddp = CoreDDP(mlp(256, 2))
    slow = {name: Slow(commhooks.make(name)) for name in ("bf16", "int8")}
    hook: Any = commhooks.register(ddp, "auto", candidates=slow, measure_steps=3, link_s=0.2)
    cap_mb, raced = hook.bucket_cap_mb, []
    with _slow_line(seconds_per_byte):
        while not hook.decided and hook.step < 300:  # races go on while times are noisy
            if hook._search._stage is begins:
                SLEEPS[0] = sleep
            torch.manual_seed(10 * hook.step + rank)
            ddp.zero_grad()
            ddp(torch.randn(8, 256)).square().mean().backward()
            raced.append(str(hook.scheme))
    gradients = [one.grad.reshape(-1) for one in ddp.parameters() if one.grad is not None]
    return {
        "plan": hook.plan,
        "told": hook.plan in hook.summary(),
        "raced": raced,
        "scheme": without_flush(hook.scheme) == commhooks.make("none"),
        "buckets": hook.bucket_cap_mb == cap_mb,
        "saved": hook.saved_plan(),
        "step": hook.step,
        "gradients": torch.cat(gradients),
    }


@pytest.mark.parametrize("case", NONE_IS_BEST)
def test_where_no_scheme_is_faster_none_runs_on_all_ranks(case: str) -> None:
    first, second = run_ranks(_without_winner, 2, case)
    assert "auto runs none" in first["plan"], first["plan"]
    assert first["scheme"]
    assert first["buckets"]
    assert first["told"]
    assert first["saved"] == '{"undecided": false}'
    tried = any("Slow" in scheme for scheme in first["raced"])
    assert tried == ("int8" in first["plan"]) == (case != "predicted to be slow")
    assert torch.equal(first.pop("gradients"), second.pop("gradients"))
    assert first == second


def _option(name: str, seconds: float, error: float = 0.0) -> Option:
    return Option(name, Dense(), 8.0, Step(seconds, 1.0, 0.0, 0.0, 0, 0.0, 1), error)


def test_what_is_tried_is_near_the_best_and_dense_comes_last() -> None:
    options = [
        _option(*one) for one in [("a", 1.0), ("b", 1.05), ("b", 1.06), ("c", 1.2), ("none", 2.0)]
    ]
    assert [one.name for one in promising(options)] == ["a", "b", "none"]
    assert promising([_option("none", 1.0), _option("a", 1.2)]) == []


def test_the_best_schemes_are_tried_in_the_fewest_buckets_as_well() -> None:
    options = [
        replace(_option(*one), cap_mb=cap)
        for *one, cap in [
            ("a", 1.0, 0.0, 4.0),
            ("b", 1.01, 0.0, 50.0),
            ("a", 1.05, 0.0, 25.0),
            ("c", 1.06, 0.0, 4.0),
            ("c", 1.07, 0.0, 50.0),
            ("a", 1.3, 0.0, 50.0),
            ("none", 2.0, 0.0, 8.0),
        ]
    ]
    tried = [(one.name, one.cap_mb) for one in promising(options)]
    assert tried == [("a", 4.0), ("b", 50.0), ("c", 4.0), ("a", 25.0), ("none", 8.0)]


@dataclass(frozen=True)
class _Zeros(Scheme):
    """Averages to zero."""

    traits = Traits()

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        total = yield commhooks.AllReduce(bucket.gradient.clone(), "sum")
        return commhooks.Result(torch.zeros_like(total))


def _run_a_recorded_plan(rank: int, world_size: int) -> list[tuple[list[str], bool]]:
    found = []
    for kind in (CoreDDP, DistributedDataParallel):
        ddp: Any = kind(mlp())
        hook = commhooks.register(ddp, "none")

        def step(ddp: Any = ddp) -> torch.Tensor:
            ddp(torch.randn(4, 16)).square().mean().backward()
            gradient: torch.Tensor = next(ddp.parameters()).grad
            return gradient.clone()

        recorder = Recorder(ddp)
        for _ in range(2):
            recorder.step_begins()
            step()
        recorder.step_begins()
        recorder.close()
        names = [layer.name for layer in recorder.workload("model").layers]
        plan = Split("none", "zeros", 1, 2, tuple(names))
        # A rule that matches no parameter warns, which is an error here.
        hook.switch(split_scheme(plan, {"none": commhooks.make("none"), "zeros": _Zeros()}))
        ddp.zero_grad()
        found.append((sorted(names), bool((step() == 0).all())))
    return found


def test_a_plan_of_two_schemes_names_parameters_as_hooks_do() -> None:
    """They had the prefix of DistributedDataParallel, so that the second scheme never ran."""
    names = sorted(name for name, _ in mlp().named_parameters())
    for found in run_ranks(_run_a_recorded_plan, 2):
        assert found == [(names, True)] * 2


_TAKES_ZERO = Version(torch.__version__) >= Version("2.12")  # torch's class


def _takes(kind: Any, sizes: dict[str, Any]) -> bool:
    return kind is CoreDDP or sizes != {"bucket_cap_mb": 0} or _TAKES_ZERO


def _sizes_of_models(rank: int, world_size: int) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 5}, {"bucket_cap_mb": 0}]
    classes: list[Any] = [CoreDDP, DistributedDataParallel]
    models = [one(mlp(8, 2), **sizes) for one in classes for sizes in asked if _takes(one, sizes)]
    # Torch's class has the argument since 2.12.
    with_list = [one for one in classes if "bucket_cap_mb_list" in signature(one).parameters]
    models += [one(mlp(8, 2), bucket_cap_mb_list=[2, 50, 5]) for one in with_list]
    return [_sizes(one) for one in models]


def test_buckets_that_the_user_has_sized_stay_so() -> None:
    """They were searched on our class, where they do not change either."""
    found = run_ranks(_sizes_of_models, 2)[0]
    byte = 1 / 2**20  # each parameter has a bucket of its own
    asked = [{"caps_mb": (5.0,), "first_mb": 5.0}, {"caps_mb": (byte,), "first_mb": byte}]
    assert found[:3] == [{"caps_mb": CAPS_MB, "first_mb": 1.0}, *asked]
    end = 6 if _TAKES_ZERO else 5
    assert found[3:end] == [{"caps_mb": (25.0,), "first_mb": 1.0}, *asked][: end - 3]
    assert found[end:]
    assert all(one == {"caps_mb": (5.0,), "first_mb": 2.0} for one in found[end:])


def test_the_fastest_is_kept_unless_dense_or_a_more_exact_one_is_as_fast() -> None:
    fast, exact, dense = _option("a", 1.0, 0.1), _option("b", 1.0, 0.01), _option("none", 1.0)
    assert chosen([(1.0, fast), (1.5, exact), (2.0, dense)], 2.0) == (1.0, fast)
    assert chosen([(1.0, fast), (1.005, exact), (2.0, dense)], 2.0) == (1.005, exact)
    assert chosen([(1.0, fast), (1.015, exact), (2.0, dense)], 2.0) == (1.0, fast)
    assert chosen([(1.99, fast)], 2.0) is None
    assert chosen([], 2.0) is None


def _search(*of_ranks: Any) -> Search:
    """A search that hears these values of its ranks."""
    search = Search(mock.Mock(step=0), mock.Mock(), {}, error=0.05, steps=2, link_s=0.1)
    search._of_all = lambda value: [*of_ranks]  # type: ignore[method-assign]
    return search


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    search = _search([1.0, 5.0, 2.0], [3.0, 1.0, 1.0])
    search._end_stage()
    assert search._dense_s == 3.0  # of 3, 5 and 2
    search = _search([1.0, 5.0], [3.0, 1.0])
    search._race = Race([_option("a", 1.0)])
    search._stage = type(search._stage).TRIAL
    search._end_stage()
    assert search._race.entries[0].times == [3.0, 5.0]


def test_two_steps_warm_up_and_are_not_timed() -> None:
    search = _search([1.0])
    with mock.patch.object(search, "_end_stage"):
        for search._hook.step in range(6):
            search.forward_begins()
    assert len(search._times) == 3  # the third one on, until the last one began


def test_all_ranks_try_what_rank_0_has_predicted() -> None:
    own, other = _option("none", 1.0), _option("none", 2.0)
    row = (own.name, own.cap_mb, own.step, own.error, own.split)
    search = _search([row], [])
    search._candidates = made_candidates([])
    (found,) = search._agreed_on([other])
    assert (found.step, found.cap_mb) == (own.step, own.cap_mb)


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
    split = Split("int8", "onebit", 1, 2, ("0.weight", "0.bias"))
    found = []
    for scheme in ("int4", "onebit", "bf16"):
        hook = commhooks.register(CoreDDP(mlp()), scheme)
        again = commhooks.register(CoreDDP(mlp()), "auto", candidates=["int4", "onebit", "int8"])
        again.load_state_dict(hook.state_dict(gather=True))
        found.append((scheme, str(again.scheme == hook.scheme)))
    free, own = CoreDDP(mlp()), CoreDDP(mlp(), bucket_cap_mb=2)
    chose: Any = commhooks.register(free, "auto", candidates=["int8", "onebit"])
    option = Option(str(split), scheme_of("", split, chose._candidates), 4.0, NO_STEP, 0.1, split)
    chose._search._race = _raced((option, 0.5))
    chose._search._dense_s = 1.0
    chose._search._decide()
    again = commhooks.register(CoreDDP(mlp()), "auto", candidates=["int8", "onebit"])
    again.load_state_dict(chose.state_dict(gather=True))
    found.append((str(split), str(again.scheme == chose.scheme and again.bucket_cap_mb == 4.0)))
    sized: Any = commhooks.register(own, "auto", candidates=["int8"])
    sized._search._race = _raced((replace(_option("int8", 0.5), cap_mb=2.0), 0.5))
    sized._search._dense_s = 1.0
    sized._search._decide()
    found.append(
        ("a size that was given is no choice", str('"cap_mb": null' in sized.saved_plan()))
    )
    return found


def test_a_resumed_run_has_the_settings_and_the_split_that_were_chosen() -> None:
    for found in run_ranks(_resume_each, 2):
        assert [same for _, same in found] == ["True"] * 5, found


def _resume_undecided(rank: int, world_size: int) -> tuple[bool, int, bool]:
    ddp = CoreDDP(mlp())
    hook: Any = commhooks.register(ddp, "auto", candidates=["int8"])
    for _ in range(4):
        ddp(torch.randn(4, 16)).sum().backward()
    ddp = CoreDDP(mlp())
    again: Any = commhooks.register(ddp, "auto", candidates=["int8"], measure_steps=2, link_s=0.1)
    again.load_state_dict(hook.state_dict(gather=True))
    before = again._search.over
    steps = 0
    while not again._search.over and steps < 300:  # races go on while times are noisy
        ddp(torch.randn(4, 16)).sum().backward()
        steps += 1
    return before, again.step - steps, again._search.over


def test_a_run_that_stopped_before_the_decision_searches_anew() -> None:
    for before, step, after in run_ranks(_resume_undecided, 2):
        assert not before
        assert step == 4
        assert after


def _raced(*found: tuple[Option, float]) -> Race[Option]:
    race = Race([option for option, _ in found])
    for _, seconds in found:
        race.add([seconds] * 8)
    return race


@pytest.mark.parametrize(("again", "kept"), [((0.9, 1.0), True), ((1.1, 1.0), False)])
def test_a_choice_that_seems_to_have_lost_is_raced_against_dense_steps(
    again: tuple[float, float], kept: bool
) -> None:
    hook, installed = mock.Mock(step=0), []
    hook._binding.model = mock.Mock(spec=CoreDDP, bucket_bytes_cap_default=True)
    search = Search(hook, installed.append, {}, error=0.05, steps=2, link_s=0.1)
    search._race = _raced((_option("a", 0.9), 0.9), (_option("none", 1.0), 1.0))
    search._try_next()
    assert not search.over
    assert search.cap_mb == 8.0
    search._keep_or_race_again(1.1)
    assert not search.over
    for seconds in again:
        search._race.add([seconds] * 8)
        search._try_next()
    assert search.over
    assert (search.choice is not None) == kept == ("auto runs a" in search.plan)
    assert (search.cap_mb == 8.0) == kept


@pytest.mark.parametrize(
    ("since", "verdict"),
    [(0.9, "The choice holds."), (1.1, "That is more than dense steps took: compared once more.")],
)
def test_the_plan_and_its_comparison_are_logged(since: float, verdict: str) -> None:
    search = Search(mock.Mock(step=0), mock.Mock(), {}, error=0.05, steps=2, link_s=0.1)
    search._race = _raced((_option("a", 0.9), 0.9), (_option("none", 1.0), 1.0))
    with TestCase().assertLogs("commhooks", "INFO") as log:  # caplog is off, see pyproject.toml
        search._try_next()
        decided = search.plan
        search._keep_or_race_again(since)
    took = f"It took {1e3 * since:.1f} ms per step since."
    assert [record.getMessage() for record in log.records] == [
        decided,
        f"{decided} {took} {verdict}",
    ]
    assert decided.startswith("auto runs a in buckets of 8 MiB: 10 % less time")
    assert "none in buckets of 8 MiB: 1000.0 ms per step, predicted 1000.0 ms" in decided


def test_a_wrong_setting_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="no average"):
        made_candidates(["noop"])
    assert math.isclose(made_candidates([])["none"].traits.error.variance, 0.0)
