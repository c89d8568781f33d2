"""Parameters that FSDP2 gathers as packed differences to what all ranks have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import commhooks
from commhooks.errors import RegistrationError
from commhooks.hosts import gather_parameters
from tests.distributed.harness import run_ranks
from tests.distributed.test_fsdp2 import backward, gradients, model_of, sharded

SIZES = (33, 650, 640, 7)  # of matrices that are worth packing


def _held(model: nn.Module) -> list[Tensor]:
    """Returns the parameters that the next forward pass computes with, as they are gathered now."""
    modules: list[Any] = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for one in modules:
        one.unshard()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    for one in modules:
        one.reshard()
    return values


def _exact(model: nn.Module) -> list[Tensor]:
    return [one.full_tensor().detach().clone() for one in model.parameters()]  # type: ignore[attr-defined]


def _distance(ones: list[Tensor], others: list[Tensor]) -> float:
    pairs = zip(ones, others, strict=True)
    return sum(float((one - other).square().sum()) for one, other in pairs) ** 0.5


def _equal_on_all_ranks(values: list[Tensor]) -> bool:
    mine = torch.cat([value.flatten().float() for value in values])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(one, mine) for one in everyone)


def _trained(rank: int, world_size: int, name: str, options: dict[str, Any]) -> None:
    model = sharded(model_of(SIZES), **options)
    scheme = commhooks.make("eden", bits=4) if name == "eden" else name
    gathered: Any = gather_parameters(model, scheme, differences=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = _exact(model)
    for step in range(6):
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    after = _exact(model)
    found = _held(model)
    assert _equal_on_all_ranks(found)
    # The error is one of the steps, not one of the parameters, and does not add up.
    wide = options.get("mp_policy") is None
    most = {"int8": 0.02, "int4": 0.15, "eden": 0.5}[name] * _distance(after, before)
    assert _distance(found, after) < most + (
        0.0 if wide else 2e-3 * _distance(after, [0 * one for one in after])
    )
    assert not wide or _distance(found, after) > 0
    # One gather in each forward pass, none in backward; the last one by ``_held``.
    assert gathered.calls == 3 * 7
    share = (0.26 if name == "int8" else 0.14) * (1 if wide else 2)
    ledger = gathered.ledger
    assert ledger.payload_bytes < (1 + 6 * share) / 7 * ledger.dense_bytes  # the first is exact


@pytest.mark.parametrize("name", ["int8", "int4", "eden"])
def test_errors_are_those_of_a_step(name: str) -> None:
    run_ranks(_trained, 2, name, {})


def test_parameters_in_16_bits() -> None:
    run_ranks(_trained, 2, "int8", {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)})


def _first(rank: int, world_size: int) -> None:
    plain, ours = sharded(model_of(SIZES)), sharded(model_of(SIZES))
    gather_parameters(ours, "int4", differences=True)
    for model in (plain, ours):
        backward(model, 0, rank)
    wanted, found = map(gradients, (plain, ours))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_first_step_is_exact(world_size: int) -> None:
    run_ranks(_first, world_size)


def _steps(model: nn.Module, rank: int, count: int = 3, passes: int = 1) -> list[Tensor]:
    """Trains; returns gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(count):
        for turn in range(passes):
            backward(model, passes * step + turn, rank)
        optimizer.step()
        found = gradients(model)
    return list(found.values())


def _recomputed(rank: int, world_size: int, reentrant: bool) -> None:
    """Forward runs again in backward, with the weights that it had."""
    results = []
    for checkpoints in (False, True):
        model = model_of(SIZES)
        if checkpoints:
            # Around the FSDP2 modules, which are gathered again where forward runs again.
            inner = sharded(model)
            ours: nn.Module = nn.Sequential(checkpoint_wrapper(inner))
        else:
            inner = ours = sharded(model)
        gather_parameters(inner, "int4", differences=True)
        results.append(_steps(ours, rank))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_activation_checkpoints_have_the_weights_of_forward() -> None:
    run_ranks(_recomputed, 2, False)


def _beside(rank: int, world_size: int) -> None:
    """Accumulated gradients, evaluation and a hook of gradients beside gathered differences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(SIZES), mesh["shard"])
    hook = commhooks.register(model, "powersgd", between=mesh["replicate"], rank=2)
    inside = commhooks.register(model, "int8")
    gathered: Any = gather_parameters(model, "int4", differences=True)
    _steps(model, rank, passes=2)
    with torch.no_grad():
        output = model(torch.ones(2, 33))
    assert _equal_on_all_ranks([output])
    assert hook.step == inside.step == 6
    assert gathered.calls == 3 * 7
    assert _equal_on_all_ranks(_exact(model))


def test_beside_hooks_accumulation_and_evaluation() -> None:
    run_ranks(_beside, 4)


def _on_a_part(rank: int, world_size: int) -> None:
    models = [sharded(model_of(SIZES), reshard_after_forward=after) for after in (True, 2)]
    for model in models:
        gather_parameters(model, "int8", differences=True)
    wanted, found = (_steps(model, rank) for model in models)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_parameters_that_stay_on_a_part_of_the_ranks() -> None:
    run_ranks(_on_a_part, 4)


def _loaded(rank: int, world_size: int) -> None:
    model = sharded(model_of(SIZES))
    gathered: Any = gather_parameters(model, "int8", differences=True)
    _held(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype).mean() + 1.0)
    gathered.begin_anew()
    assert _distance(_held(model), _exact(model)) == 0
    # Not finite for one pass: nothing of it stays.
    good = _exact(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.nan)
    assert any(not one.isfinite().all() for one in _held(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    size = _distance(good, [0 * one for one in good])
    for most in (0.1, 0.01, 0.01):
        assert _distance(_held(model), _exact(model)) < most * size


def test_loaded_parameters_and_those_that_were_not_finite() -> None:
    run_ranks(_loaded, 2)


def _ahead(rank: int, world_size: int) -> None:
    model = sharded(model_of(SIZES))
    gather_parameters(model, "int8", differences=True)
    _steps(model, rank)
    modules = [one for one in model.modules() if isinstance(one, FSDPModule)]
    for handle in [one.unshard(async_op=True) for one in modules]:
        assert handle is not None
        handle.wait()
    values = [one.detach().clone() for one in model.parameters()]
    for one in modules:
        one.reshard()
    size = _distance(values, [0 * one for one in values])
    assert _distance(values, _exact(model)) < 0.01 * size


def test_parameters_that_are_gathered_ahead() -> None:
    run_ranks(_ahead, 2)


def _failed(rank: int, world_size: int) -> None:
    model = sharded(model_of(SIZES))
    gathered: Any = gather_parameters(model, "int8", differences=True)
    _held(model)
    codec, scheme = type(gathered.scheme), gathered.scheme
    before = codec.unpack

    def raises(*_: Any, **__: Any) -> Tensor:
        raise ArithmeticError("planned")

    codec.unpack = raises
    try:
        with pytest.raises(RuntimeError, match="ArithmeticError: planned"):
            _held(model)
    finally:
        codec.unpack = before
    assert scheme is gathered.scheme
    assert gathered.modules[0].held is None


def test_nothing_is_held_of_a_gather_that_failed() -> None:
    run_ranks(_failed, 2)


def _refused(rank: int, world_size: int) -> None:
    model = sharded(model_of())
    for scheme, message in (
        ("none", "none rounds nothing"),
        ("powersgd", "does not pack a shard"),
        ("eden", "would grow"),  # of 1 bit
    ):
        with pytest.raises(RegistrationError, match=message):
            gather_parameters(model, scheme, differences=True)
    with pytest.raises(RegistrationError, match="take a name such as none"):
        gather_parameters(model, "int4")
    gather_parameters(model, "int4", differences=True)
    with pytest.raises(RegistrationError, match="DifferencesAllGather already"):
        gather_parameters(model)


def test_refusals() -> None:
    run_ranks(_refused, 2)
