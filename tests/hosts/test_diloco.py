"""DiLoCo between real processes, against the same arithmetic written down in one."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks import DiLoCo, Scheme
from commhooks.core import Bucket, Result, SchemeExchange, Traits
from commhooks.errors import CheckpointError, MismatchError
from commhooks.local import local_sgd
from commhooks.local._fragments import fragments_of
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import averaged, batch, ddp, equal_on_all_ranks, mlp, parameters

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


def _run_diloco(
    rank: int, steps: int, options: dict[str, Any], scheme: str = "none"
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


@pytest.mark.parametrize(
    "options",
    [{"every": 4}, {"every": 6, "fragments": 3}, {"every": 6, "fragments": 3, "delay": 1}],
)
@on_ranks(3)
def test_it_is_what_the_papers_say(rank: int, world_size: int, options: dict[str, Any]) -> None:
    results, applied, _ = _run_diloco(rank, 14, options)
    wanted = _by_hand(14, world_size, **options)[rank]
    torch.testing.assert_close(results, wanted, rtol=0, atol=2e-5)
    exchanges = 14 // (options["every"] // options.get("fragments", 1))
    assert sum(applied) == exchanges - (options.get("delay", 0) > 0)


@pytest.mark.parametrize("scheme", ["none", "int4", "onebit", "powersgd", "topk"])
@on_ranks(2)
def test_ranks_agree_bit_for_bit_after_an_exchange_and_gradients_do_not_travel(
    rank: int, scheme: str
) -> None:
    results, applied, rounds = _run_diloco(rank, 12, {"every": 4}, scheme)
    assert equal_on_all_ranks(results)
    assert applied == [step % 4 == 3 for step in range(12)]
    assert rounds == 3 or scheme != "none"


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("int4", {"every": 4}), ("onebit", {"every": 8, "fragments": 2, "delay": 3})],
)
@on_ranks(2)
def test_a_resumed_run_equals_one_that_went_on(
    rank: int, scheme: str, options: dict[str, Any]
) -> None:
    def begun() -> tuple[nn.Module, torch.optim.Optimizer, DiLoCo]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        return model, optimizer, DiLoCo(model, scheme, **options)

    def go_on(run: Any, steps: range) -> Tensor:
        for step in steps:
            _inner(*run[:2], step, rank)
            run[2].step()
        return parameters(run[0])

    going, resumed = begun(), begun()
    go_on(going, range(9))
    states = copy.deepcopy([part.state_dict() for part in going])
    wanted = go_on(going, range(9, 20))
    go_on(resumed, range(5))  # until an exchange is under way, which loading has to drop
    for part, state in zip(resumed, states, strict=True):
        part.load_state_dict(state)
    assert torch.equal(go_on(resumed, range(9, 20)), wanted)


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


@on_ranks(2)
def test_post_local_sgd_drifts_and_meets(rank: int) -> None:
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
        apart.append(float((averaged(parameters(model)) - parameters(model)).norm()))
    assert max(apart[:4]) < 1e-6
    assert [distance > 1e-4 for distance in apart[4:]] == [True, True, True, False] * 2
    assert equal_on_all_ranks(parameters(model))


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
    messages = [str(warning.message) for warning in caught]
    assert torch.equal(before, parameters(model))
    assert any("go back to the parameters of the last exchange" in text for text in messages)


@on_ranks(2)
def test_wrong_settings_are_named(rank: int) -> None:
    model, wrapped = mlp(), ddp(mlp())
    for setting in (
        {"every": 0},
        {"every": 10, "fragments": 3},
        {"every": 6, "fragments": 3, "delay": 2},
        {"momentum": 1.0},
        {"every": 100, "fragments": 100},
    ):
        with pytest.raises(ValueError, match="DiLoCo"):
            DiLoCo(model, **setting)
    with pytest.raises(ValueError, match="DiLoCo"):  # averages by itself, by a hook, not at all
        DiLoCo(wrapped)
    hook = commhooks.register(wrapped, "int8")
    with pytest.raises(ValueError, match="DiLoCo"):
        DiLoCo(wrapped)
    hook.switch("noop")
    DiLoCo(wrapped).close()
    with pytest.raises(MismatchError):
        DiLoCo(model, every=10 + rank)
    outer = DiLoCo(model)
    state = outer.state_dict()
    state["outer"].pop(next(iter(state["outer"])))
    with pytest.raises(CheckpointError):
        outer.load_state_dict(state)


@dataclass(frozen=True)
class _Uneven(Scheme):
    traits = Traits(agrees=False)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from bucket.all_reduce()
        return Result(result.mean.mul_(1 + bucket.rank))


@on_ranks(2)
def test_every_rank_gets_the_same_average() -> None:
    outer = DiLoCo(mlp(), every=1)
    outer.hook.switch("gossip")
    for call in (lambda: DiLoCo(mlp(), "gossip"), lambda: DiLoCo(mlp(), _Uneven()), outer.step):
        with pytest.raises(ValueError, match="gives every rank another result"):
            call()


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


@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(3)
def test_two_dtypes_are_two_buckets_of_one_step(rank: int, delay: int) -> None:
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
    assert equal_on_all_ranks(*(t for fragment in outer._all_fragments() for t in fragment.outer))
    outer.close()
    assert (outer.hook.step, outer.outer_steps) == (10, 10)
