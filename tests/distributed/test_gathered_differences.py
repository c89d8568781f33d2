"""Parameters that FSDP2 gathers as packed differences to what all ranks have."""

from __future__ import annotations

import copy
import itertools
from functools import partial
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import commhooks
from commhooks.errors import RegistrationError
from commhooks.hook.only_here import OnlyHere
from commhooks.hosts import gather_parameters
from commhooks.hosts.fsdp2_packing import GatherPacked, Packing
from commhooks.schemes import Blockwise
from commhooks.wrappers import Cast
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


@torch.no_grad()
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


def _trained_by(rank: int, world_size: int, *names: str) -> None:
    for name in names:
        _trained(rank, world_size, name)


def test_errors_are_those_of_the_last_step() -> None:
    run_ranks(_trained_by, 2, "int8", "int4")


@pytest.mark.slow
def test_errors_of_other_schemes_are_those_of_the_last_step() -> None:
    run_ranks(_trained_by, 2, "bf16", "fp8", "mxfp8", "eden")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 5])
def test_errors_on_other_numbers_of_ranks(world_size: int) -> None:
    run_ranks(_trained_by, world_size, "int4")


# ---- what is gathered, and when


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


def _first(rank: int, world_size: int) -> None:
    plain, ours = sharded(model_of(SIZES)), sharded(model_of(SIZES))
    gather_parameters(ours, "int4", differences=True)
    for model in (plain, ours):
        backward(model, 0, rank)
    wanted, found = map(gradients, (plain, ours))
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


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


def _recomputed(rank: int, world_size: int) -> None:
    """Forward runs again in backward, with the weights that it had."""
    results: list[list[Tensor]] = []
    calls = []
    for kind in (None, CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT):
        inner = sharded(model_of(SIZES))
        # Around the FSDP2 modules, which are gathered again where forward runs again.
        ours = inner if kind is None else nn.Sequential(checkpoint_wrapper(inner, kind))
        gathered = gather_parameters(inner, "int8", differences=True)
        results.append(_steps(ours, rank, needs_grad=True))
        calls.append(gathered.calls)
    # A reentrant one runs first. Else the last layer has its weights for its gradient already, and
    # has asked for those of the layer before: without messages.
    assert calls == [9, 18, 9 + 3]
    # Inside of an FSDP2 module nothing is gathered again.
    layered = model_of(SIZES)
    for name, layer in list(layered.named_children()):
        setattr(layered, name, checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT))
    for layer in [*layered.children()][::2]:
        fully_shard(layer)
    gathered = gather_parameters(fully_shard(layered), "int8", differences=True)
    results.append(_steps(layered, rank, needs_grad=True))
    assert gathered.calls == 9
    for found in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], found, strict=True))


def _twice(rank: int, world_size: int) -> None:
    """Forward passes between two steps, and backward through both, have the same weights."""
    model = sharded(model_of(SIZES))
    gathered = gather_parameters(model, "int4", differences=True)
    _steps(model, rank)
    ones = torch.ones(2, 33)
    outputs = [model(ones) for _ in range(3)]
    with torch.no_grad():
        outputs.append(model(ones))
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    held = _held(model)
    assert _distance(held, _exact(model)) > 0
    # Backward sends nothing, whether it is the first one or not, and has the weights of forward
    # also where the next gather is to be exact.
    calls, found = gathered.calls, []
    for turn in range(3):
        (outputs[0].sum() + outputs[1].sum()).backward(retain_graph=turn < 2)
        found.append(gradients(model))
        if turn == 1:
            gathered.begin_anew()
    assert gathered.calls == calls
    for one in found[1:]:
        assert all(torch.equal(one[name], value) for name, value in found[0].items())
    assert _distance(_held(model), _exact(model)) == 0


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


def _only_in_backward(rank: int, world_size: int) -> None:
    """A module that runs within backward has the weights of each step, evaluated before or not."""
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

    before = None
    for evaluates in (False, False, True):
        if evaluates:
            with torch.no_grad():
                before = model(torch.ones(2, 33))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        Head.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert not torch.equal(seen[0], seen[1])
    assert before is not None
    assert not torch.equal(seen[2], before)
    assert _distance(_held(model), _exact(model)) < 0.01 * _size(_exact(model))


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
        rounded.switch("int8", rounding="stochastic")
    with pytest.raises(RegistrationError, match="fewer than 4 bits"):
        rounded.switch("onebit")
    rounded.switch("int8")
    assert not rounded.scheme.stochastic  # type: ignore[attr-defined]


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


def _on_a_part(rank: int, world_size: int) -> None:
    models = [sharded(model_of(SIZES), reshard_after_forward=after) for after in (True, 2)]
    for model in models:
        gather_parameters(model, "int8", differences=True)
    wanted, found = (_steps(model, rank) for model in models)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


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
    # A part of the model: its parameters alone are sent as they are.
    layer: Any = model[0]  # type: ignore[index]
    layer.load_state_dict({name: 3 * value for name, value in layer.state_dict().items()})
    model[2].weight.data.add_(1.0)  # type: ignore[index]
    off = [float((a - b).abs().max()) for a, b in zip(_held(model), _exact(model), strict=True)]
    assert off[0] == off[1] == 0 < off[2]
    handles = [one.unshard(async_op=True) for one in model.modules() if isinstance(one, FSDPModule)]
    gathered.begin_anew()
    for handle in handles:
        if handle is not None:
            handle.wait()
    for one in model.modules():
        if isinstance(one, FSDPModule):
            one.reshard()
    assert _distance(_held(model), _exact(model)) == 0


def _loaded_inside(rank: int, world_size: int) -> None:
    """Of one FSDP2 module: modules in it load, and copies of them are modules of their own."""
    model: Any = fully_shard(model_of(SIZES))
    gathered = gather_parameters(model, "int4", differences=True)
    _steps(model, rank)
    copy.deepcopy(model[0]).load_state_dict(model[0].state_dict())
    assert _distance(_held(model), _exact(model)) > 0
    model[0].load_state_dict(model[0].state_dict())
    assert _distance(_held(model), _exact(model)) == 0
    gathered.close()
    hooks = [hook for one in model.modules() for hook in one._load_state_dict_post_hooks.values()]
    assert not any(isinstance(hook, OnlyHere) for hook in hooks)


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


def _overflowed(rank: int, world_size: int) -> None:
    """A difference that is too large for its codec is sent again, though nothing has changed."""
    model = sharded(model_of(SIZES))
    gather_parameters(model, "fp16", differences=True)
    for value in (-1e5, 1e5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        found = _held(model)
    assert not any(one.isfinite().any() for one in found)
    found = _held(model)
    assert _distance(found, _exact(model)) < 0.001 * _size(found)


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


def _failed(rank: int, world_size: int) -> None:
    model = sharded(model_of(SIZES))
    gathered: Any = gather_parameters(model, "int8", differences=True)
    _steps(model, rank)
    codec = type(gathered.scheme)
    before = codec.unpack_shards

    def raises(*_: Any, **__: Any) -> Tensor:
        raise ArithmeticError("planned")

    codec.unpack_shards = raises
    try:
        with pytest.raises(RuntimeError, match="ArithmeticError: planned"):
            _held(model)
    finally:
        codec.unpack_shards = before
    assert gathered._groups[0]._all_gather_comm.held is None


def _refused(rank: int, world_size: int) -> None:
    model = sharded(model_of())
    for scheme, message in (
        ("none", "none rounds nothing"),
        ("powersgd", "does not pack a shard"),
        ("eden", "would grow"),  # of 1 bit
    ):
        with pytest.raises(RegistrationError, match=message):
            gather_parameters(model, scheme, differences=True)
    for refused in ("int4", Cast(commhooks.make("topk", error_feedback=False))):
        with pytest.raises(RegistrationError, match="take a name such as none"):
            gather_parameters(model, refused)
    for few in ("onebit", Blockwise("int2"), Cast(Blockwise("sign"))):
        with pytest.raises(RegistrationError, match=r"fewer than 4 bits .* fp8 or mxfp8, or diff"):
            gather_parameters(model, few)
    gather_parameters(model, "int4", differences=True)
    with pytest.raises(RegistrationError, match="DifferencesAllGather already"):
        gather_parameters(model)


# ---- several nodes, and tensor parallelism


def _replicas(rank: int, world_size: int) -> None:
    """Nodes that call the model alike have the same weights; others have the same parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(SIZES), mesh)
    gathered = gather_parameters(model, "int4", differences=True)
    assert gathered.world_size == 2
    for _ in range(2):
        _steps(model, rank)
        assert _equal_on_all_ranks(_held(model))
    if rank < 2:
        with torch.no_grad():
            model(torch.ones(2, 33))
    _steps(model, rank)
    found = _held(model)
    assert not _equal_on_all_ranks(found)  # another rotation of the same differences
    assert _equal_on_all_ranks(_exact(model))
    assert _distance(found, _exact(model)) < 0.01 * _size(found)


PLAN: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
UNCUT = ("2.bias", "4.weight", "4.bias")  # the first is in a module with a piece


def _pieces(model: nn.Module, mesh: Any) -> dict[str, Tensor]:
    """Returns the parameters of this rank of tensor parallelism, exact, on the ranks of FSDP2."""
    found = {}
    for name, parameter in model.named_parameters():
        local: Any = parameter
        shards = [torch.empty(0)] * mesh["dp"].size()
        dist.all_gather_object(shards, local.to_local(), group=mesh["dp"].get_group())
        found[name] = torch.cat(shards)
    return found


def _columns(rank: int, world_size: int) -> None:
    """Parameters that tensor parallelism does not cut stay equal on its ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, differences in (("int8", False), ("bf16", False), ("int8", True), ("int4", True)):
        model = sharded(
            parallelize_module(model_of((33, 256, 130, 7)), mesh["tp"], PLAN), mesh["dp"]
        )
        model._set_unshard_async_op(name == "int4")  # type: ignore[operator]
        gathered = gather_parameters(model, name, differences=differences)
        _steps(model, mesh["dp"].get_local_rank())
        names = [name for name, _ in model.named_parameters()]
        values = [one.to_local() if isinstance(one, DTensor) else one for one in _held(model)]
        found = dict(zip(names, values, strict=True))
        exact = _pieces(model, mesh)
        assert _equal_on_all_ranks([found[name] for name in UNCUT])
        assert torch.equal(found["2.bias"], exact["2.bias"])
        for name in ("2.weight", "4.weight"):
            assert 0 < _distance([found[name]], [exact[name]]) < 0.02 * _size([exact[name]])
        ledger = gathered.ledger
        assert ledger.payload_bytes < 0.55 * ledger.dense_bytes


# ---- all of these, in few process starts


def _each(rank: int, world_size: int, *cases: Any) -> None:
    for case in cases:
        case(rank, world_size)


def test_the_first_step_is_exact() -> None:
    run_ranks(_first, 3)


def test_when_and_as_what_fsdp2_gathers() -> None:
    run_ranks(_each, 2, _first, _in_16_bits, _ahead_of_time, _ahead)


def test_backward_has_the_weights_of_forward() -> None:
    run_ranks(_each, 2, _twice, _recomputed, ignore_warnings=(".*use_reentrant.*",))


def test_a_module_that_runs_in_backward_has_new_weights() -> None:
    run_ranks(_only_in_backward, 2)


def test_inference_mode() -> None:
    run_ranks(
        _each, 2, partial(_inference, differences=True), partial(_inference, differences=False)
    )


def test_loaded_parameters() -> None:
    run_ranks(_each, 2, _loaded, _loaded_inside)


def test_values_that_are_not_finite_do_not_stay() -> None:
    run_ranks(_each, 2, _not_finite, _overflowed)


def test_schemes_that_are_refused_and_gathers_that_fail() -> None:
    run_ranks(_each, 2, _switched, _refused, _failed)


def test_several_nodes_and_parts_of_the_ranks() -> None:
    run_ranks(_each, 4, _beside, _on_a_part, _replicas)


def test_what_has_no_known_parts_travels_as_it_is() -> None:
    """A tensor of the user's own form, or one of which nothing is to be packed."""
    parts = Packing(((3, True), (2, False)))
    codec = Blockwise("int8", 64)
    for mine, numel, plain in (
        (parts, 5, False),
        (parts, 6, True),
        (Packing(((5, False),)), 5, True),
    ):
        given = torch.zeros(numel)
        call = GatherPacked("all_gather", given, given.new_zeros(2 * numel), packing=mine)
        assert call.is_plain(codec) == plain


def test_beside_tensor_parallelism() -> None:
    run_ranks(_columns, 4, ignore_warnings=(".*returned a view tensor",))


def _beside_large_ones(rank: int, world_size: int, differences: bool) -> float:
    """Relative error of a bias that is 10,000 times smaller than the weight before it."""
    torch.manual_seed(0)
    layer = nn.Linear(39, 26)
    change = 1e-4 * torch.randn(26)
    with torch.no_grad():
        layer.bias.copy_(change)
    model = fully_shard(layer)
    gather_parameters(model, "int8", differences=differences)
    if differences:
        model.unshard()
        model.reshard()
        with torch.no_grad():
            for parameter, by in ((model.weight, 1.0), (model.bias, 1e-4)):
                change = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                parameter.add_(distribute_tensor(by * change, parameter.device_mesh, [Shard(0)]))
        change = by * change
    before = model.bias.full_tensor().detach()
    model.unshard()
    return float((model.bias.detach() - before).norm() / change.norm())


@pytest.mark.parametrize("differences", [False, True])
def test_a_small_parameter_is_gathered_as_exactly_as_its_large_neighbour(differences: bool) -> None:
    assert 0 < max(run_ranks(_beside_large_ones, 2, differences)) < 0.01
