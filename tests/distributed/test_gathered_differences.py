"""Parameters that FSDP2 gathers as packed differences to what all ranks have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
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


def _size(values: list[Tensor]) -> float:
    return _distance(values, [torch.zeros_like(one) for one in values])


def _equal_on_all_ranks(values: list[Tensor]) -> bool:
    mine = torch.cat([value.flatten().float() for value in values])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(one, mine) for one in everyone)


def _scheme(name: str) -> str | commhooks.Scheme:
    return commhooks.make("eden", bits=4) if name == "eden" else name


# Of what has changed: the share that is left after one gather.
LEFT = {"bf16": 0.003, "int8": 0.01, "fp8": 0.05, "mxfp8": 0.05, "int4": 0.15, "eden": 0.15}


def _trained(rank: int, world_size: int, name: str) -> None:
    """The error is one of the last difference: it does not add up."""
    model = sharded(model_of(SIZES))
    gathered = gather_parameters(model, _scheme(name), differences=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sizes = []
    for step in range(6):
        before = _exact(model)
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(_distance(_exact(model), before))
    found = _held(model)
    assert _equal_on_all_ranks(found)
    # What was left of the step before is a part of the last difference.
    last = sizes[-1] + LEFT[name] * max(sizes)
    assert 0 < _distance(found, _exact(model)) < LEFT[name] * last
    # One gather in each forward pass, none in backward; the last one by ``_held``.
    assert gathered.calls == 3 * 7
    share = {"bf16": 0.51, "int4": 0.14, "eden": 0.14}.get(name, 0.27)
    ledger = gathered.ledger
    assert ledger.payload_bytes < (1 + 6 * share) / 7 * ledger.dense_bytes  # the first is exact


@pytest.mark.parametrize(
    "name",
    [name if name[:3] == "int" else pytest.param(name, marks=pytest.mark.slow) for name in LEFT],
)
def test_errors_are_those_of_the_last_step(name: str) -> None:
    run_ranks(_trained, 2, name)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 5])
def test_errors_on_other_numbers_of_ranks(world_size: int) -> None:
    run_ranks(_trained, world_size, "int4")


def _in_16_bits(rank: int, world_size: int) -> None:
    model = sharded(model_of(SIZES), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    gather_parameters(model, "int8", differences=True)
    _steps(model, rank)
    found = _held(model)
    assert all(one.dtype == torch.bfloat16 for one in found)
    assert _equal_on_all_ranks(found)
    # Both sides are rounded to 16 bits; then the difference is some units of the last place.
    wanted = [one.bfloat16() for one in _exact(model)]
    assert _distance(found, wanted) < 0.002 * _size(wanted)


def test_parameters_in_16_bits() -> None:
    run_ranks(_in_16_bits, 2)


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


def _steps(
    model: nn.Module, rank: int, count: int = 3, passes: int = 1, needs_grad: bool = False
) -> list[Tensor]:
    """Trains; returns gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(count):
        for turn in range(passes):
            generator = torch.Generator().manual_seed(1000 * (passes * step + turn) + rank)
            inputs = torch.randn(8, 33, generator=generator, requires_grad=needs_grad)
            model(inputs).float().square().sum().backward()
        optimizer.step()
        found = gradients(model)
    return list(found.values())


def _recomputed(rank: int, world_size: int, reentrant: bool) -> None:
    """Forward runs again in backward, with the weights that it had."""
    results = []
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for checkpoints in (False, True):
        inner = sharded(model_of(SIZES))
        # Around the FSDP2 modules, which are gathered again where forward runs again.
        ours = nn.Sequential(checkpoint_wrapper(inner, kind)) if checkpoints else inner
        gather_parameters(inner, "int4", differences=True)
        results.append(_steps(ours, rank, needs_grad=True))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_have_the_weights_of_forward(reentrant: bool) -> None:
    run_ranks(_recomputed, 2, reentrant, ignore_warnings=(".*use_reentrant.*",))


def _twice(rank: int, world_size: int) -> None:
    """Forward passes between two steps, and backward through both, have the same weights."""
    model = sharded(model_of(SIZES))
    gather_parameters(model, "int4", differences=True)
    _steps(model, rank)
    ones = torch.ones(2, 33)
    outputs = [model(ones) for _ in range(3)]
    with torch.no_grad():
        outputs.append(model(ones))
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    held = _held(model)
    (outputs[0].sum() + outputs[1].sum()).backward(retain_graph=True)
    first = gradients(model)
    (outputs[0].sum() + outputs[1].sum()).backward()
    second = gradients(model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert _distance(_held(model), held) == 0


def test_passes_between_two_steps_have_the_same_weights() -> None:
    run_ranks(_twice, 2)


def _inference(rank: int, world_size: int, differences: bool) -> None:
    model = sharded(model_of(SIZES))
    gathered = gather_parameters(model, "int8", differences=differences)
    ones = torch.ones(2, 33)
    model(ones)  # FSDP2 itself cannot train where its first pass was one of inference mode
    if differences:
        gathered.begin_anew()
    for _ in range(2):
        with torch.inference_mode():
            output = model(ones)
        assert torch.equal(output.clone(), model(ones).detach())
        _steps(model, rank)


@pytest.mark.parametrize("differences", [True, False])
def test_inference_mode(differences: bool) -> None:
    run_ranks(_inference, 2, differences)


def _ahead_of_time(rank: int, world_size: int) -> None:
    """FSDP2's settings of when it gathers change no bit."""
    results = []
    for setting in ("", "prefetch", "async", "kept"):
        model: Any = sharded(model_of(SIZES), reshard_after_forward=setting != "kept")
        gather_parameters(model, "int4", differences=True)
        layers = [one for one in model.children() if isinstance(one, FSDPModule)]
        if setting == "prefetch":
            for one, after in itertools.pairwise(layers):
                one.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([one])
        if setting == "async":
            model._set_unshard_async_op(True)
        results.append(_steps(model, rank))
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], found, strict=True))


def test_when_fsdp2_gathers_changes_no_bit() -> None:
    run_ranks(_ahead_of_time, 2)


def _only_in_backward(rank: int, world_size: int) -> None:
    """A module that runs within backward only has the weights of each step."""
    model = sharded(model_of(SIZES))
    gather_parameters(model, "int8", differences=True)
    seen: list[Tensor] = []

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            with torch.no_grad():
                seen.append(model(torch.ones(2, 33)))
            for one in model.modules():
                if isinstance(one, FSDPModule):
                    one.reshard()
            return gradient

    for _ in range(3):
        Head.apply(torch.ones(2, requires_grad=True)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_a_module_that_runs_in_backward_only_has_new_weights() -> None:
    run_ranks(_only_in_backward, 2)


def _switched(rank: int, world_size: int) -> None:
    model = sharded(model_of(SIZES))
    gathered = gather_parameters(model, "int4", differences=True)
    _steps(model, rank)
    for refused in ("topk_", "powersgd", "eden"):
        with pytest.raises(commhooks.Error):
            gathered.switch(refused)
    gathered.switch("int8")
    assert not gathered.scheme.stochastic  # type: ignore[attr-defined]
    _steps(model, rank)
    gathered.switch("none")
    assert _distance(_held(model), _exact(model)) == 0
    gathered.switch("int4")
    _steps(model, rank)
    gathered.close()
    assert _distance(_held(model), _exact(model)) == 0
    rounded = gather_parameters(model, "int8")
    with pytest.raises(RegistrationError, match="different weights"):
        rounded.switch("int8", stochastic=True)
    rounded.switch("int8")
    assert not rounded.scheme.stochastic  # type: ignore[attr-defined]


def test_another_scheme_has_the_same_conditions() -> None:
    run_ranks(_switched, 2)


def _beside(rank: int, world_size: int) -> None:
    """Accumulated gradients, evaluation and a hook of gradients beside gathered differences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(SIZES), mesh["shard"])
    hook = commhooks.register(model, "powersgd", between=mesh["replicate"], rank=2)
    inside = commhooks.register(model, "int8")
    gathered = gather_parameters(model, "int4", differences=True)
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
    gathered = gather_parameters(model, "int4", differences=True)
    _held(model)
    other = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    assert _distance(_held(model), _exact(model)) == 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    assert 0 < _distance(_held(model), _exact(model)) < 0.2 * _size(_exact(model))
    handles = [one.unshard(async_op=True) for one in model.modules() if isinstance(one, FSDPModule)]
    gathered.begin_anew()
    for handle in handles:
        if handle is not None:
            handle.wait()
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.reshard()
    assert _distance(_held(model), _exact(model)) == 0


def test_loaded_parameters() -> None:
    run_ranks(_loaded, 2)


def _not_finite(rank: int, world_size: int) -> None:
    for name in ("int4", "bf16"):
        model = sharded(model_of(SIZES))
        gather_parameters(model, name, differences=True)
        size = _size(_held(model))
        for value in (torch.nan, torch.inf, -torch.inf):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)
            assert any(not one.isfinite().all() for one in _held(model))
            for _ in range(3):  # steps with good values
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(0.25).add_(torch.rand(()).item() * 1e-4)
                found = _held(model)
            assert _distance(found, _exact(model)) < 0.05 * size


def test_values_that_are_not_finite_do_not_stay() -> None:
    run_ranks(_not_finite, 2)


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
    assert all(torch.equal(one, other) for one, other in zip(values, _held(model), strict=True))
    assert _distance(values, _exact(model)) < 0.001 * _size(values)


def test_parameters_that_are_gathered_ahead() -> None:
    run_ranks(_ahead, 2)


def _failed(rank: int, world_size: int) -> None:
    model = sharded(model_of(SIZES))
    gathered: Any = gather_parameters(model, "int8", differences=True)
    _steps(model, rank)
    codec = type(gathered.scheme)
    before = codec.unpack

    def raises(*_: Any, **__: Any) -> Tensor:
        raise ArithmeticError("planned")

    codec.unpack = raises
    try:
        with pytest.raises(RuntimeError, match="ArithmeticError: planned"):
            _held(model)
    finally:
        codec.unpack = before
    assert gathered._groups[0]._all_gather_comm.held is None


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
