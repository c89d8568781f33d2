"""Parameters that FSDP2 gathers by a scheme, beside what else it does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import commhooks
from commhooks.errors import RegistrationError
from commhooks.fsdp import gather_parameters
from commhooks.fsdp._gather import GatherPacked, Packing
from commhooks.schemes import Blockwise
from commhooks.wrappers import Cast
from tests.fsdp.test_fsdp2 import model_of, sharded, take_gradients
from tests.tools.harness import on_ranks
from tests.tools.training import equal_on_all_ranks, relative_error

SIZES = (33, 650, 640, 7)  # of matrices that are worth packing


def _held(model: nn.Module) -> list[Tensor]:
    """Returns the parameters that the next forward pass computes with, as they are gathered now."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    for module in modules:
        module.reshard()
    return values


def _exact(model: nn.Module) -> list[Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


@torch.no_grad()
def _distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    pairs = zip(tensors, others, strict=True)
    return sum(float((value - other).square().sum()) for value, other in pairs) ** 0.5


def _size(values: list[Tensor]) -> float:
    return _distance(values, [torch.zeros_like(value) for value in values])


def _steps(model: nn.Module, rank: int, count: int = 3, passes: int = 1) -> list[Tensor]:
    """Trains; returns gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    last: dict[str, Tensor] = {}
    for step in range(count):
        for turn in range(passes):
            generator = torch.Generator().manual_seed(1000 * (passes * step + turn) + rank)
            inputs = torch.randn(8, 33, generator=generator)
            model(inputs).float().square().sum().backward()
        optimizer.step()
        last = take_gradients(model)
    return list(last.values())


# ---- what is gathered, and when


@pytest.mark.slow
@on_ranks(2)
def test_parameters_are_gathered_in_16_bits(rank: int) -> None:
    model = sharded(model_of(SIZES), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    gather_parameters(model, "int8")
    _steps(model, rank)
    values = _held(model)
    assert all(value.dtype == torch.bfloat16 for value in values)
    assert equal_on_all_ranks(*values)
    wanted = [value.bfloat16() for value in _exact(model)]
    assert 0 < _distance(values, wanted) < 0.01 * _size(wanted)


@pytest.mark.slow
@on_ranks(2)
def test_parameters_are_gathered_in_inference_mode(rank: int) -> None:
    model = sharded(model_of(SIZES))
    gather_parameters(model, "int8")
    inputs = torch.ones(2, 33)
    model(inputs)  # FSDP2 itself cannot train where its first pass was one of inference mode
    for _ in range(2):
        with torch.inference_mode():
            output = model(inputs)
        assert torch.equal(output.clone(), model(inputs).detach())
        _steps(model, rank)


@pytest.mark.slow
@on_ranks(2)
def test_parameters_are_gathered_ahead_of_time(rank: int) -> None:
    """FSDP2's settings of when it gathers change no bit."""
    results = []
    for setting in ("", "prefetch", "async", "kept"):
        model: Any = sharded(model_of(SIZES), reshard_after_forward=setting != "kept")
        gather_parameters(model, "int8")
        layers = [layer for layer in model.children() if isinstance(layer, FSDPModule)]
        if setting == "prefetch":
            for layer, after in itertools.pairwise(layers):
                layer.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([layer])
        if setting == "async":
            model._set_unshard_async_op(True)
        results.append(_steps(model, rank))
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


@on_ranks(2)
def test_a_switch_of_what_gathers(rank: int) -> None:
    model = sharded(model_of(SIZES))
    gathered = gather_parameters(model, "int8")
    with pytest.raises(RegistrationError, match="different weights"):
        gathered.switch("int8", rounding="stochastic")
    with pytest.raises(RegistrationError, match="fewer than 4 bits"):
        gathered.switch("onebit")
    gathered.switch("none")
    assert _distance(_held(model), _exact(model)) == 0
    gathered.switch("int8")
    assert not gathered.scheme.stochastic  # type: ignore[attr-defined]
    assert _distance(_held(model), _exact(model)) > 0
    gathered.close()
    assert _distance(_held(model), _exact(model)) == 0
    gather_parameters(model, "fp8")


@on_ranks(2)
def test_a_gather_that_fails(rank: int) -> None:
    """A gather that fails raises, and the next one is as if it had not been."""
    model = sharded(model_of(SIZES))
    gathered = gather_parameters(model, "int8")
    wanted, codec = _held(model), type(gathered.scheme)
    before = codec.unpack_shards  # type: ignore[attr-defined]

    def raises(*_: Any, **__: Any) -> Tensor:
        raise ArithmeticError("planned")

    codec.unpack_shards = raises  # type: ignore[attr-defined]
    try:
        with pytest.raises(RuntimeError, match="ArithmeticError: planned"):
            _held(model)
    finally:
        codec.unpack_shards = before  # type: ignore[attr-defined]
    assert all(map(torch.equal, wanted, _held(model)))


@on_ranks(2)
def test_schemes_that_are_refused(rank: int) -> None:
    model = sharded(model_of())
    for refused in ("int4", Cast(commhooks.make("topk", error_feedback=False))):
        with pytest.raises(RegistrationError, match="take a name such as none"):
            gather_parameters(model, refused)
    for few in ("onebit", Blockwise("int2"), Cast(Blockwise("sign"))):
        with pytest.raises(RegistrationError, match=r"fewer than 4 bits .* int8 or fp8"):
            gather_parameters(model, few)


# ---- several hooks, and tensor parallelism


@on_ranks(4)
def test_beside_hooks_of_gradients(rank: int) -> None:
    """Accumulated gradients, evaluation and hooks of gradients beside gathered parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(model_of(SIZES), mesh["shard"])
    hook = commhooks.register(model, "powersgd", replicate_group=mesh["replicate"], rank=2)
    inside = commhooks.register(model, "int8")
    gather_parameters(model, "int8")
    _steps(model, rank, passes=2)
    with torch.no_grad():
        output = model(torch.ones(2, 33))
    assert equal_on_all_ranks(output)
    assert hook.step == inside.step == 6
    assert equal_on_all_ranks(*_exact(model))


PLAN: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
UNCUT = ("2.bias", "4.weight", "4.bias")  # the first is in a module with a piece


def _pieces(model: nn.Module, mesh: Any) -> dict[str, Tensor]:
    """Returns the parameters of this rank of tensor parallelism, exact, on the ranks of FSDP2."""
    pieces = {}
    for name, parameter in model.named_parameters():
        local: Any = parameter
        shards = [torch.empty(0)] * mesh["dp"].size()
        dist.all_gather_object(shards, local.to_local(), group=mesh["dp"].get_group())
        pieces[name] = torch.cat(shards)
    return pieces


@on_ranks(4, ignore_warnings=(".*returned a view tensor",))
def test_beside_tensor_parallelism() -> None:
    """Parameters that tensor parallelism does not cut stay equal on its ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for scheme in ("int8", "bf16"):
        model = sharded(
            parallelize_module(model_of((33, 256, 130, 7)), mesh["tp"], PLAN), mesh["dp"]
        )
        model._set_unshard_async_op(scheme == "int8")  # type: ignore[operator]
        gathered = gather_parameters(model, scheme)
        _steps(model, mesh["dp"].get_local_rank())
        names = [name for name, _ in model.named_parameters()]
        values = [
            value.to_local() if isinstance(value, DTensor) else value for value in _held(model)
        ]
        gathered_values = dict(zip(names, values, strict=True))
        exact = _pieces(model, mesh)
        assert equal_on_all_ranks(*[gathered_values[name] for name in UNCUT])
        assert torch.equal(gathered_values["2.bias"], exact["2.bias"])
        for name in ("2.weight", "4.weight"):
            assert (
                0 < _distance([gathered_values[name]], [exact[name]]) < 0.02 * _size([exact[name]])
            )
        ledger = gathered.ledger
        assert ledger.payload_bytes < 0.55 * ledger.dense_bytes


def test_what_has_no_known_parts_travels_as_it_is() -> None:
    """A tensor of the user's own form, or one of which nothing is to be packed."""
    parts = Packing(((3, True), (2, False)))
    codec = Blockwise("int8", 64)
    for packing, numel, plain in (
        (parts, 5, False),
        (parts, 6, True),
        (Packing(((5, False),)), 5, True),
    ):
        given = torch.zeros(numel)
        call = GatherPacked("all_gather", given, given.new_zeros(2 * numel), packing=packing)
        assert call.is_plain(codec) == plain


@on_ranks(2)
def test_a_small_parameter_is_gathered_as_exactly_as_its_large_neighbour() -> None:
    """A bias that is 10,000 times smaller than the weight before it."""
    torch.manual_seed(0)
    layer = nn.Linear(39, 26)
    bias = 1e-4 * torch.randn(26)
    with torch.no_grad():
        layer.bias.copy_(bias)
    model = fully_shard(layer)
    gather_parameters(model, "int8")
    model.unshard()
    assert 0 < relative_error(model.bias.detach(), bias) < 0.01
