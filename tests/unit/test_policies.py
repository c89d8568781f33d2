"""Rules by role, schedules over steps, the guard, and the budget solver."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, PerParameter, Rule, Schedule, Scheme, Simulation, make
from commhooks.core import Bucket, Layout, Result, Traits
from commhooks.core._scheme import SchemeExchange
from commhooks.research.budget import allocate
from commhooks.schemes import Blockwise, Dense, PowerSGD
from commhooks.wrappers import Guard, role_of
from commhooks.wrappers import _guard as _guard
from commhooks.wrappers._feedback import RESIDUAL
from ddp_core import AllReduce
from tests.unit.references import rank_gradients

N = 2048
random_gradients = partial(rank_gradients, numel=N)


# ---- rules


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("transformer.wte.weight", (100, 8), "embedding"),
        ("embed_tokens.weight", (100, 8), "embedding"),
        ("lm_head.weight", (100, 8), "head"),
        ("classifier.bias", (10,), "bias"),
        ("layers.3.norm1.weight", (8,), "norm"),
        ("layers.3.ln_2.bias", (8,), "norm"),
        ("bn1.weight", (8,), "norm"),
        ("layers.3.qkv.weight", (24, 8), "matrix"),
        ("layers.3.qkv.bias", (24,), "bias"),
        ("body.0.weight", (8, 3, 3, 3), "matrix"),
        ("gamma", (8,), "vector"),
        ("scale", (), "vector"),
    ],
)
def test_roles_follow_from_name_and_shape(name: str, shape: tuple[int, ...], role: str) -> None:
    assert role_of(name, shape) == role


def test_rules_choose_by_role_and_size() -> None:
    tiny, embeddings = make("bf16"), make("topk")
    policy = PerParameter(
        [Rule(embeddings, role="embedding"), Rule(tiny, max_numel=100)], default=make("powersgd")
    )

    def chosen(name: str, *shape: int) -> Scheme:
        return policy.schemes[policy.choose(name, torch.Size(shape), torch.float32)]

    assert chosen("wte.weight", 5, 5) == embeddings
    assert chosen("fc.weight", 5, 5) == tiny
    assert chosen("fc.weight", 50, 50) == make("powersgd")
    with pytest.raises(ValueError, match=r"Rule\(role=...\) is one of embedding, head"):
        Rule(tiny, role="router")


def test_equal_schemes_of_many_rules_share_rounds() -> None:
    rules = [Rule(make("int8"), name=f"layer{i}.*") for i in range(50)]
    policy = PerParameter(rules, default=make("none"))
    assert policy.traits.rounds == 3
    shapes = {f"layer{i}.weight": (64, 8) for i in range(10)}
    ranks = Simulation(policy, shapes, world_size=2)
    ranks.step(random_gradients(2, 0, numel=10 * 512))
    assert len(ranks.requests) == 2


# ---- schedules


def test_a_schedule_runs_each_part_in_its_steps() -> None:
    parts = [(0, make("none")), (3, make("powersgd", rank=2)), (6, make("topk", ratio=0.01))]
    ranks = Simulation(Schedule(parts), {"w": (32, 64)}, world_size=2)
    names = []
    for step in range(9):
        ranks.requests.clear()
        ranks.step(random_gradients(2, step))
        names.append([name for name, _ in ranks.requests])
    assert names[:3] == [["all_reduce"]] * 3
    assert names[3:6] == [["all_reduce", "all_reduce"]] * 3
    assert names[6:] == [["all_gather"]] * 3


@pytest.mark.parametrize("last", ["none", "int8", "topk"])
def test_a_schedule_loses_nothing_where_parts_meet(last: str) -> None:
    parts = [(0, make("onebit")), (4, make("powersgd")), (7, make(last))]
    ranks = Simulation(Schedule(parts), {"w": (32, 64)}, world_size=3)
    applied = total = torch.zeros(N, dtype=torch.float64)
    for step in range(10):
        grads = random_gradients(3, step)
        total = total + torch.stack(grads).double().mean(0)
        applied = applied + ranks.step(grads)[0]
    kept = torch.stack([ranks.memory(rank) for rank in range(3)]).mean(0)
    noise = 0.2 if last == "int8" else 1e-4
    torch.testing.assert_close(applied + kept, total, rtol=0, atol=noise)


@pytest.mark.parametrize("steps", [[], [1], [0, 5, 5], [0, 5, 3]])
def test_steps_of_a_schedule_ascend_from_zero(steps: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"Schedule\(parts=...\) takes pairs of a step and a scheme"
    ):
        Schedule([(step, Dense()) for step in steps])


# ---- the guard


@dataclass(frozen=True)
class Breaks(Scheme):
    """Averages, but for a part of the gradient from some step on."""

    step: int
    factor: float = 0.1

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient = bucket.gradient
        if bucket.step >= self.step:
            gradient = gradient * self.factor
        mean = yield AllReduce(gradient)
        return Result(mean)


def _steps(ranks: Simulation, count: int, begin: int = 0) -> tuple[list[float], list[str]]:
    """Relative errors of the steps, and what was said."""
    errors = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(begin, begin + count):
            grads = random_gradients(len(ranks.engines), step)
            exact = torch.stack(grads).mean(0)
            means = ranks.step(grads)
            assert all(torch.equal(mean, means[0]) for mean in means)
            errors.append(float((means[0] - exact).norm() / exact.norm()))
    return errors, [str(warning.message) for warning in caught]


def test_a_guard_goes_back_to_dense_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_guard, "_REST", 10)
    guard = Guard(Breaks(22), every=5, max_error=0.5)
    errors, messages = _steps(Simulation(guard, {"w": (N,)}, world_size=3), 45)
    bad = [step for step, error in enumerate(errors) if error > 0.5]
    assert bad == [22, 23, 24, 35, 36, 37, 38, 39]  # seen in steps 24 and 39, dense for ten
    assert len(messages) == 2
    assert "step 24, bucket of w: the error of the average is 0.9, at most 0.5" in messages[0]
    assert "Averaging without compression for 10 steps" in messages[0]


def test_a_guard_sees_growth_without_a_bound() -> None:
    guard = Guard(Int8ThenBroken(30), every=5)
    errors, messages = _steps(Simulation(guard, {"w": (N,)}, world_size=2), 60)
    assert max(errors[:30]) < 0.02
    assert max(errors[35:]) < 1e-6
    assert len(messages) == 1
    assert "times what it used to be" in messages[0]
    assert "Averaging without compression for 1000 steps" in messages[0]


@dataclass(frozen=True)
class Wrong(Scheme):
    """Averages with a relative error that is told for each step."""

    errors: tuple[float, ...]

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        mean = yield AllReduce(bucket.gradient * (1 - self.errors[bucket.step]))
        return Result(mean)


def test_growth_is_that_over_a_moving_average_from_the_fourth_measurement_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_guard, "_GROWTH", 3.0)
    # The third is 3.5 times the average before, and not judged. Then the average is 0.8 * 0.1 +
    # 0.2 * 0.35 = 0.15, and 0.5 is 3.3 times that; with its weights swapped it would be 0.3.
    guard = Guard(Wrong((0.1, 0.1, 0.35, 0.5)), every=1)
    _, messages = _steps(Simulation(guard, {"w": (N,)}, world_size=2), 4)
    assert len(messages) == 1
    assert "step 3, bucket of w: the error is 0.5, 3.3 times what it used to be" in messages[0]


@dataclass(frozen=True)
class Int8ThenBroken(Scheme):
    step: int

    traits = Traits(rounds=2)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        scheme = make("int8") if bucket.step < self.step else Breaks(0)
        return (yield from scheme.exchange(bucket))


def test_a_good_scheme_is_left_alone() -> None:
    for name in ("int8", "powersgd", "onebit", "topk"):
        guard = Guard(make(name), every=4)
        _, messages = _steps(Simulation(guard, {"w": (32, 64)}, world_size=2), 60)
        assert not messages, name


def test_a_step_that_is_not_finite_is_not_judged() -> None:
    ranks = Simulation(Guard(make("int8"), every=1, max_error=0.5), {"w": (N,)}, world_size=2)
    bad = random_gradients(2, 0)
    bad[1][5] = math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ranks.step(bad)[0][5].isfinite()
        ranks.step(random_gradients(2, 1))


# ---- the budget


SHAPES = {"low": (64, 48), "full": (48, 64), "tail": (3000,), "bias": (48,)}
LAYOUT = Layout(list(SHAPES), list(SHAPES.values()))
CANDIDATES = [Blockwise("int8", 256), Blockwise("int4", 256), Blockwise("sign", 256), Dense()]


def recorded() -> list[tuple[Layout, list[Tensor]]]:
    steps = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)

        def draw(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator)

        grads = []
        for _ in range(2):
            parts = [draw(64, 2) @ draw(2, 48), draw(48, 64) * 0.1, draw(3000) ** 5, draw(48)]
            grads.append(torch.cat([part.flatten() for part in parts]))
        steps.append((LAYOUT, grads))
    return steps


def test_a_budget_of_bits_beats_every_uniform_choice_within_it() -> None:
    steps = recorded()
    for bits in (6.0, 10.0, 16.0, 40.0):
        allocation = allocate(steps, CANDIDATES, bits=bits)
        assert allocation.bits <= bits
        for candidate in CANDIDATES:
            uniform = allocate(steps, [candidate], bits=1e9)
            if uniform.bits <= bits:
                assert allocation.error <= uniform.error * 1.001
    assert allocate(steps, CANDIDATES, bits=200.0).error < 1e-12


def test_a_budget_of_error_is_met_with_fewer_bits() -> None:
    steps = recorded()
    uniform = allocate(steps, [CANDIDATES[1]], bits=1e9)
    allocation = allocate(steps, CANDIDATES, max_error=uniform.error)
    assert allocation.error <= uniform.error
    assert allocation.bits <= uniform.bits


@pytest.mark.filterwarnings("ignore:a float16 payload is not finite")
def test_a_candidate_that_overflows_is_left_out() -> None:
    layout = Layout(["large", "small"], [(4096,), (4096,)])
    scale = torch.tensor([1e6, 1.0]).repeat_interleave(4096)
    steps = [
        (
            layout,
            [
                torch.randn(8192, generator=torch.Generator().manual_seed(r)) * scale
                for r in range(2)
            ],
        )
    ]
    narrow, cheap, wide = make("none", wire_dtype="fp16"), make("bf16"), make("none")
    # bf16 is good enough; with an infinite error in the sums everything would be dense.
    allocation = allocate(steps, [narrow, cheap, wide], max_error=1e-4)
    assert allocation.bits == 16.0
    assert 0 < allocation.error <= 1e-4
    with pytest.raises(ValueError, match=r"no candidate gives a finite average of .*'large'"):
        allocate(steps, [narrow], bits=64.0)


def test_gradients_of_zero_have_no_error() -> None:
    steps = [(Layout(["w"], [(8,)]), [torch.zeros(8)] * 2)]
    assert allocate(steps, [make("int8")], bits=64.0).error == 0.0


def test_the_greedy_choice_is_near_the_best_of_all() -> None:
    steps = recorded()
    singles = {
        candidate: allocate(steps, [candidate], bits=1e9).table.assign(scheme=str(candidate))
        for candidate in CANDIDATES
    }
    norms = []
    for index in range(len(LAYOUT)):
        part = slice(LAYOUT.offsets[index], LAYOUT.offsets[index + 1])
        means = [torch.stack(grads).double().mean(0)[part] for _, grads in steps]
        norms.append(sum(float(mean.square().sum()) for mean in means))
    budget = 12.0
    best = math.inf
    for choice in itertools.product(CANDIDATES, repeat=len(LAYOUT)):
        rows = [singles[candidate].iloc[index] for index, candidate in enumerate(choice)]
        bits = sum(row.bits * row.entries for row in rows) / sum(LAYOUT.sizes)
        if bits <= budget:
            lost = sum(row.error * norm for row, norm in zip(rows, norms, strict=True))
            best = min(best, lost / sum(norms))
    allocation = allocate(steps, CANDIDATES, bits=budget)
    assert best <= allocation.error * 1.0001
    assert allocation.error <= 2.0 * best + 1e-9


def test_ranks_differ_by_layer_and_the_result_trains() -> None:
    candidates = [ErrorFeedback(PowerSGD(rank=rank)) for rank in (1, 2, 4, 16)]
    allocation = allocate(recorded(), candidates, max_error=1e-4)
    chosen = dict(zip(allocation.table.parameter, allocation.table.scheme, strict=True))
    assert "rank=2" in chosen["low"] or "rank=4" in chosen["low"]
    ranks = Simulation(allocation.scheme, SHAPES, world_size=2)
    for _, grads in recorded():
        means = ranks.step(grads)
        assert torch.equal(means[0], means[1])
    assert RESIDUAL in {key for key, _, _ in ranks.engines[0].memory.items()}


def test_budgets_that_cannot_be_met_are_refused() -> None:
    steps = recorded()
    with pytest.raises(ValueError, match=r"need .* bits per entry at least"):
        allocate(steps, CANDIDATES, bits=0.5)
    with pytest.raises(ValueError, match=r"leave .* at least"):
        allocate(steps, CANDIDATES[2:3], max_error=0.001)
    with pytest.raises(ValueError, match="one of the two is given"):
        allocate(steps, CANDIDATES)
    with pytest.raises(ValueError, match="one scheme at least"):
        allocate(steps, [], bits=1)
