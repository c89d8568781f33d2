"""DiLoCo between real processes, against the same arithmetic written down in one."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import DiLoCo, Scheme
from commhooks.core import Bucket, Result, SchemeExchange, Traits
from commhooks.local import local_sgd
from commhooks.local._fragments import fragments_of
from tests.tools.harness import on_ranks, run_cases, run_ranks
from tests.tools.training import batch, ddp, equal_bits, mlp, outcome, parameters

LR = 0.1


@pytest.mark.parametrize("sizes", [[1, 1, 100], [100, 1, 1], [1, 1, 1], [1] * 11 + [1000]])
def test_no_part_is_empty_whatever_the_sizes(sizes: list[int]) -> None:
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    parts = [[name for value in part for name in value.names] for part in fragments_of(model, 3)]
    assert all(parts)
    assert [name for part in parts for name in part] == [str(i) for i in range(len(sizes))]


def _inner(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    inputs = batch(step, rank, 8, 16)
    (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
    optimizer.step()


def _train(
    rank: int, world_size: int, steps: int, options: dict[str, Any], scheme: str = "none"
) -> tuple[Tensor, list[bool], int]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    outer = DiLoCo(model, scheme, **options)
    applied = []
    for step in range(steps):
        _inner(model, optimizer, step, rank)
        applied.append(outer.step())
    sent = len(outer.hook.report())
    outer.close()
    return parameters(model), applied, sent


def _by_hand(
    steps: int,
    ranks: int,
    every: int,
    lr: float = 0.7,
    momentum: float = 0.9,
    fragments: int = 1,
    delay: int = 0,
) -> list[Tensor]:
    """The models of all ranks, trained in turn; the layers are the fragments."""
    models = [mlp() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    outer = [p.detach().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(p) for p in outer]
    sent: list[tuple[int, list[int], list[Tensor]]] = []
    each = len(outer) // fragments
    for step in range(1, steps + 1):
        for rank in range(ranks):
            _inner(models[rank], optimizers[rank], step - 1, rank)
        if step % (every // fragments) == 0:
            part = step // (every // fragments) % fragments
            members = list(range(part * each, (part + 1) * each))
            deltas = []
            for i in members:
                local = [list(model.parameters())[i].detach() for model in models]
                deltas.append(torch.stack([outer[i] - value for value in local]).mean(0))
            sent.append((step + delay, members, deltas))
        for due, members, deltas in list(sent):
            if due != step:
                continue
            for i, delta in zip(members, deltas, strict=True):
                velocity[i] = momentum * velocity[i] + delta
                outer[i] = outer[i] - lr * (delta + momentum * velocity[i])
                for model in models:
                    p = list(model.parameters())[i]
                    p.data.copy_((p.data + outer[i]) / 2 if delay else outer[i])
    return [parameters(model) for model in models]


def test_it_is_what_the_papers_say() -> None:
    ranks = 3
    settings: list[dict[str, Any]] = [
        {"every": 4}, {"every": 6, "fragments": 3}, {"every": 6, "fragments": 3, "delay": 1},
    ]  # fmt: skip
    cases = [(14, options) for options in settings]
    for options, results in zip(settings, run_cases(_train, ranks, cases), strict=True):
        for (got, applied, _), wanted in zip(results, _by_hand(14, ranks, **options), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
            assert sum(applied) == 14 // (options["every"] // options.get("fragments", 1)) - (
                options.get("delay", 0) > 0
            )


def test_ranks_agree_bit_for_bit_after_an_exchange_and_gradients_do_not_travel() -> None:
    schemes = ("none", "int4", "onebit", "powersgd", "topk")
    cases = [(12, {"every": 4}, scheme) for scheme in schemes]
    for scheme, results in zip(schemes, run_cases(_train, 2, cases), strict=True):
        assert equal_bits([got for got, _, _ in results]), scheme
        for _, applied, rounds in results:
            assert applied == [step % 4 == 3 for step in range(12)]
            assert rounds == 3 or scheme != "none"


def _resumed(rank: int, world_size: int, scheme: str, options: dict[str, Any]) -> list[Tensor]:
    ends = []
    saved: dict[str, Any] = {}
    for resume in (False, True):
        model = mlp(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        outer = DiLoCo(model, scheme, **options)
        if resume:
            for step in range(5):  # until an exchange is under way, which loading has to drop
                _inner(model, optimizer, step, rank)
                outer.step()
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            outer.load_state_dict(saved["outer"])
        for step in range(9 if resume else 0, 20):
            if step == 9 and not resume:
                saved = copy.deepcopy(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "outer": outer.state_dict(),
                    }
                )
            _inner(model, optimizer, step, rank)
            outer.step()
        ends.append(parameters(model))
        outer.close()
    return ends


def test_a_resumed_run_equals_one_that_went_on() -> None:
    under_way = {"every": 8, "fragments": 2, "delay": 3}
    for ranks in run_cases(_resumed, 2, [("int4", {"every": 4}), ("onebit", under_way)]):
        for went_on, resumed in ranks:
            assert torch.equal(went_on, resumed)


@on_ranks(2)
def test_local_sgd_of_one_step_is_data_parallel(rank: int) -> None:
    """Averaging parameters after each step of SGD is averaging gradients."""
    model, plain = mlp(), ddp(mlp())
    optimizers = [torch.optim.SGD(value.parameters(), lr=LR) for value in (model, plain)]
    averager = local_sgd(model, every=1)
    for step in range(6):
        _inner(model, optimizers[0], step, rank)
        averager.step()
        _inner(plain, optimizers[1], step, rank)
    torch.testing.assert_close(parameters(model), parameters(plain), rtol=0, atol=1e-6)


def _post_local(rank: int, world_size: int) -> tuple[list[float], Tensor]:
    """Gradients first, then parameters: on one DistributedDataParallel."""
    model = ddp(mlp())
    hook = commhooks.register(model, "none")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    apart = []
    averager = None
    for step in range(12):
        if step == 4:
            hook.switch("noop")
            averager = local_sgd(model, every=4)
        _inner(model, optimizer, step, rank)
        if averager is not None:
            averager.step()
        mean = parameters(model)
        dist.all_reduce(mean)
        apart.append(float((mean / world_size - parameters(model)).norm()))
    return apart, parameters(model)


def test_post_local_sgd_drifts_and_meets() -> None:
    results = run_ranks(_post_local, 2)
    for apart, _ in results:
        assert max(apart[:4]) < 1e-6
        assert [distance > 1e-4 for distance in apart[4:]] == [True, True, True, False] * 2
    assert equal_bits([end for _, end in results])


@on_ranks(2)
def test_a_rank_that_diverges_takes_no_other_with_it(rank: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    outer = DiLoCo(model, "int8", every=2)
    for step in range(4):
        _inner(model, optimizer, step, rank)
        outer.step()
    before = parameters(model)
    _inner(model, optimizer, 4, rank)
    outer.step()
    if rank == 1:
        next(model.parameters()).data[0, 0] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outer.step()
    said = [str(warning.message) for warning in caught]
    assert torch.equal(before, parameters(model))
    assert any("go back to the parameters of the last exchange" in text for text in said)


@on_ranks(2)
def test_wrong_settings_are_named(rank: int) -> None:
    model = mlp()
    settings: list[dict[str, Any]] = [
        {"every": 0},
        {"every": 10, "fragments": 3},
        {"every": 6, "fragments": 3, "delay": 2},
        {"momentum": 1.0},
        {"every": 100, "fragments": 100},
    ]
    results = [outcome(DiLoCo, model, **setting) for setting in settings]
    wrapped = ddp(mlp())
    results.append(outcome(DiLoCo, wrapped))  # averages by itself, by a hook, not at all
    hook = commhooks.register(wrapped, "int8")
    results.append(outcome(DiLoCo, wrapped))
    hook.switch("noop")
    DiLoCo(wrapped).close()
    results.append(outcome(DiLoCo, model, every=10 + rank))
    outer = DiLoCo(model)
    state = outer.state_dict()
    state["outer"].pop(next(iter(state["outer"])))
    results = [*results, outcome(outer.load_state_dict, state)]
    assert [error[0] for error in results] == [
        *["ValueError"] * 7,
        "MismatchError",
        "CheckpointError",
    ]


@dataclass(frozen=True)
class _Uneven(Scheme):
    traits = Traits(agrees=False)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from bucket.all_reduce()
        return Result(result.mean.mul_(1 + bucket.rank))


@on_ranks(2)
def test_every_rank_gets_the_same_average() -> None:
    results = [outcome(DiLoCo, mlp(), scheme) for scheme in ("gossip", _Uneven())]
    outer = DiLoCo(mlp(), every=1)
    outer.hook.switch("gossip")
    results = [*results, outcome(outer.step)]
    for kind, message in results:
        assert kind == "ValueError"
        assert "gives every rank another result" in message


def _smaller(rank: int, world_size: int, states: list[Any]) -> Any:
    model = mlp(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    outer = DiLoCo(model, "int4", every=4)
    if not states:
        for step in range(6):
            _inner(model, optimizer, step, rank)
            outer.step()
        return {"model": model.state_dict(), "outer": outer.state_dict()}
    held = [state["outer"]["hook"] for state in states]
    outer.load_state_dict({**states[0]["outer"], "hook": held})
    model.load_state_dict(states[0]["model"])
    name = next(iter(dict(model.named_parameters())))
    before = sum(state[f"rank{i}"]["memory"]["residual"][name] for i, state in enumerate(held))
    return torch.equal(outer.hook.residual(name), before / len(held))  # the mean stays


def test_two_ranks_go_on_as_one() -> None:
    states = run_ranks(_smaller, 2, [])
    assert run_ranks(_smaller, 1, states) == [True]


def _two_dtypes(rank: int, _: int, delay: int) -> tuple[int, int, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20).to(torch.float64))
    outer = commhooks.DiLoCo(model, "random_k", ratio=0.2, every=2, delay=delay, lr=1.0)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(20 + delay):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
        time.sleep(0.002 * rank)  # ranks are not in step
        outer.step()
    values = torch.cat([t.double().flatten() for f in outer._all_fragments() for t in f.outer])
    outer.close()
    return outer.hook.step, outer.outer_steps, values


def test_two_dtypes_are_two_buckets_of_one_step() -> None:
    for results in run_cases(_two_dtypes, 3, [(0,), (1,)]):
        assert {(steps, outer_steps) for steps, outer_steps, _ in results} == {(10, 10)}
        assert equal_bits([values for *_, values in results])
