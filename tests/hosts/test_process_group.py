"""A process group that runs a scheme, and data parallelism on FSDP2 by one."""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as composable
from torch.distributed._composable.replicate_with_fsdp import replicate as on_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
import commhooks.research.baselines
import ddp_core
from commhooks.errors import MismatchError, RegistrationError, UnknownSchemeError
from commhooks.hosts._process_group import SchemeGroup
from commhooks.schemes import TopK
from tests.tools.harness import on_ranks, run_ranks
from tests.tools.training import batch, equal_on_all_ranks, mlp, relative_error, train

STEPS = 5
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SMALL = {"bucket_cap_mb": 0.004}  # several buckets, some of them of equal size


train_five = partial(train, steps=range(STEPS), width=32)


def worst_error(means: list[Tensor], exact: list[Tensor]) -> float:
    return max(map(relative_error, means, exact))


def wrapped(group: Any = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(mlp(32, 4), process_group=group, **{**SMALL, **options})


# ---- what passes


def _all_reduced(tensor: Tensor, place: Any, **options: Any) -> Tensor:
    dist.all_reduce(tensor, group=place, **options)
    return tensor


def _broadcast(tensor: Tensor, place: Any) -> Tensor:
    dist.broadcast(tensor, 0, group=place)
    return tensor


def _gathered(tensor: Tensor, place: Any) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor, group=place)
    return torch.cat(parts)


def _all_to_all(tensor: Tensor, place: Any) -> Tensor:
    into = torch.empty(dist.get_world_size() * 100)
    dist.all_to_all_single(into, tensor[: len(into)].clone(), group=place)
    return into


def _sent(tensor: Tensor, place: Any) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=place)
    elif dist.get_rank() == 1:
        dist.recv(tensor, 0, group=place)
    return tensor


@on_ranks(2, 3)
def test_all_but_large_sums_of_floats_passes_as_it_is(rank: int, world_size: int) -> None:
    group, world = commhooks.process_group("int8", least=100), dist.group.WORLD
    assert dist.get_backend(group) == "commhooks"
    assert dist.get_process_group_ranks(group) == list(range(world_size))
    assert (group.rank(), group.size()) == (rank, world_size)
    assert group.group_name != world.group_name
    assert init_device_mesh("cpu", (world_size,)).get_group() is world
    inputs = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    for call, given in (
        (partial(_all_reduced, op=dist.ReduceOp.MAX), inputs),
        (_all_reduced, (inputs * 100).long()),
        (_all_reduced, inputs[:99]),
        *((call, inputs) for call in (_broadcast, _gathered, _all_to_all, _sent)),
    ):
        assert torch.equal(call(given.clone(), group), call(given.clone(), world)), call
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    assert everyone == [{"rank": value} for value in range(world_size)]
    dist.barrier(group=group)
    assert group.hook.calls == 0

    plain, ours = _all_reduced(inputs.clone(), world), inputs.clone()
    assert dist.all_reduce(ours, group=group, async_op=True).wait()
    assert 0 < relative_error(ours, plain) < 0.02
    mean = _all_reduced(inputs.clone(), group, op=dist.ReduceOp.AVG)
    assert relative_error(mean, plain / world_size) < 0.02
    assert group.hook.calls == 2
    assert group.hook.ledger.dense_bytes == 2 * inputs.nbytes


class _Complex(nn.Module):
    """A layer of complex numbers, and one of reals."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(32, 64, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(64, 32))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.complex64) @ self.first).abs() @ self.second


@on_ranks(2)
def test_complex_numbers_travel_exactly(rank: int, world_size: int) -> None:
    """Compares complex numbers, as torch hands them to a group, with those of a plain group."""
    tensor = torch.randn(3000, dtype=torch.complex64, generator=torch.Generator().manual_seed(rank))

    def coalesced(given: Tensor, place: Any) -> Tensor:
        with dist._coalescing_manager(group=place):
            dist.all_reduce(given, group=place)
        return given

    def scattered(given: Tensor, place: Any) -> Tensor:
        part = given.new_empty(len(given) // world_size)
        scatter(part, given, group=place)
        return part

    calls = {
        "all_reduce": lambda place: _all_reduced(tensor.clone(), place),
        "slice": lambda place: _all_reduced(tensor.clone().view(50, 60)[3:47], place),
        "inference": torch.inference_mode()(lambda place: _all_reduced(tensor.clone(), place)),
        "of reals": lambda place: _all_reduced(
            torch.view_as_complex(torch.view_as_real(tensor).clone()), place
        ),
        "reduce_scatter": lambda place: scattered(tensor.clone(), place),
        "coalesced": lambda place: coalesced(tensor.clone(), place),
        "functional": lambda place: functional.all_reduce(tensor, "sum", place) + 0,
    }
    inputs, plain = batch(0, rank, 8, 32), dist.group.WORLD
    for name, wrap in {
        "torch": DistributedDataParallel,
        "core": ddp_core.DistributedDataParallel,
    }.items():

        def of_model(place: Any, wrap: Any = wrap) -> Tensor:
            model = wrap(_Complex(), process_group=place)
            model(inputs).sum().backward()
            return model.module.first.grad  # type: ignore[no-any-return]

        calls[name] = of_model
    group = commhooks.process_group("int8")
    for name, call in calls.items():
        assert torch.equal(call(group), call(plain)), name


@on_ranks(3)
def test_a_group_of_some_ranks_is_made_again_and_again(rank: int) -> None:
    """Groups of groups, one after the other, and of ranks of which only some come."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    inside = pairs[rank // 2]
    for _ in range(3):
        group = commhooks.process_group("int8", inside)
        tensor = torch.full((2000,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        assert round(float(tensor.mean()), 1) == 3
        dist.destroy_process_group(group)
        lanes = [thread for thread in threading.enumerate() if thread.name == "commhooks-lanes"]
        for lane in lanes:
            lane.join(10)
        assert not any(lane.is_alive() for lane in lanes)


@on_ranks(2)
def test_what_has_a_scheme_of_its_own_runs_it_alone_over_a_group(
    rank: int, world_size: int
) -> None:
    """Runs a function, a ``Collectives`` and a hook over a group that compresses."""
    group: Any = commhooks.process_group("int8", least=1)
    inputs = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    total, by_function, by_object = inputs.clone(), inputs.clone(), inputs.clone()
    dist.all_reduce(total)
    commhooks.all_reduce(by_function, group=group)
    commhooks.Collectives(group=group).all_reduce(by_object)
    means = []
    for over in (dist.group.WORLD, group):
        mesh = DeviceMesh.from_group(
            over, "cpu", mesh=list(range(world_size)), mesh_dim_names=("shard",)
        )
        model = fully_shard(mlp(32, 4), mesh=mesh)
        commhooks.register(model, "none")
        means.append(train_five(model, rank))
    assert torch.equal(by_function, total)
    assert torch.equal(by_object, total)
    assert all(map(torch.equal, *means))
    assert group.hook.calls == 0


# ---- DistributedDataParallel without a hook


# The options of a scheme, and how far its means may be from a hook's: a group does not know the
# parameters, where the hook's blocks begin.
STATELESS: dict[str, tuple[dict[str, Any], float]] = {
    "int8": ({"rounding": "nearest", "error_feedback": False}, 0.05),
    "fp16": ({}, 1e-9),
    "bf16": ({"fp32_sum": True}, 1e-9),
    "fp8": ({"format": "mx_e4m3", "error_feedback": False}, 0.05),
}


@on_ranks(2)
def test_two_ranks_without_a_hook_get_what_a_hook_gives(rank: int) -> None:
    for name, (options, most) in STATELESS.items():
        model = wrapped(commhooks.process_group(name, least=1, **options))
        other = wrapped()
        commhooks.register(other, name, **options)
        assert worst_error(train_five(model, rank), train_five(other, rank)) < most, name
    first, again, another = (
        train_five(wrapped(commhooks.process_group("int8", least=1, seed=seed)), rank)[0]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, another)
    model = wrapped(commhooks.process_group("int8", least=1))
    dense = train_five(wrapped(), rank)
    assert worst_error(train_five(model, rank), dense) < 0.04
    core = ddp_core.DistributedDataParallel(mlp(32, 4), process_group=model.process_group)
    assert worst_error(train_five(core, rank), dense) < 0.04
    assert core.process_group is model.process_group


# ---- what is refused


@on_ranks(2)
def test_what_a_group_cannot_do_is_refused_with_what_to_do(rank: int) -> None:
    make, group = commhooks.process_group, commhooks.process_group("int8")
    others = dist.new_group([0, 1])
    for kind, text, call, *arguments in (
        (RegistrationError, "commhooks.register(model, scheme)", make, "topk"),
        (RegistrationError, "keeps state by parameter", group.hook.switch, "topk"),
        (RegistrationError, "runs a scheme already", commhooks.register, wrapped(group), "int8"),
        (RegistrationError, "runs in it already", make, "int8", group),
        (RegistrationError, "commhooks.process_group(scheme, group)",
         partial(dist.new_group, backend="commhooks")),
        (MismatchError, "least", partial(make, least=100 * (rank + 1)), "int8"),
        (UnknownSchemeError, "int8", make, "int7"),
        (RegistrationError, "process_group(scheme, group)", group.hook.change_group, others),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(text)):
            call(*arguments)


@on_ranks(2)
def test_a_biased_scheme_without_feedback_is_no_surprise(rank: int) -> None:
    with pytest.warns(RuntimeWarning, match="TopK is biased and runs without error feedback"):
        commhooks.process_group(TopK(ratio=0.25))
    commhooks.process_group(TopK(ratio=0.25), error_feedback=False)  # a warning would be an error


# ---- data parallelism on FSDP2


@on_ranks(2, ignore_warnings=(".*is deprecated.*",))
def test_replicas_on_fsdp2_average_by_a_scheme(rank: int, world_size: int) -> None:
    dense = train_five(DistributedDataParallel(mlp(32, 4)), rank)
    group = commhooks.process_group("int8", least=1)
    mesh = DeviceMesh.from_group(
        group, "cpu", mesh=list(range(world_size)), mesh_dim_names=("replicate",)
    )
    model = mlp(32, 4)
    for module in (model[0], model[2], model):
        on_fsdp(module, mesh=mesh)
    assert worst_error(train_five(model, rank), dense) <= 0.04
    assert group.hook.calls == 3 * STEPS
    for name, allowed in {"none": 1e-6, "int8": 0.04, "powersgd": 3.0}.items():
        model = mlp(32, 4)
        hook = commhooks.fsdp.replicate(model, name, modules=[model[0], model[2]])
        means = train_five(model, rank)
        assert worst_error(means, dense) <= allowed, name
        assert (hook.step, hook.calls) == (STEPS, 3 * STEPS)
        assert equal_on_all_ranks(means[-1])
    with pytest.raises(RegistrationError):
        commhooks.fsdp.replicate(mlp(), "none", mesh=mesh)


# ---- reduce-scatter, by which FSDP reduces


def test_every_call_of_torch_is_passed_on_in_python() -> None:
    # What is not may wait for ever, see ``COLLECTIVES``; torch 2.14 did in ``all_gather_single``.
    code = inspect.getsource(dist.distributed_c10d)
    called = set(re.findall(r"\bgroup\.(\w+)\(", code))
    called -= {
        "rank",
        "size",
        "set_timeout",
        "_get_backend",
        "_start_coalescing",
        "_end_coalescing",
    }
    mro = SchemeGroup.__mro__
    ours = {name for value in mro[: mro.index(dist.ProcessGroup)] for name in vars(value)}
    assert {"allgather", "broadcast"} <= called
    assert called <= ours


@on_ranks(2, 3)
def test_fully_shard_over_a_group_is_compressed(rank: int, world_size: int) -> None:
    def means_over(group: Any, dtype: Any = None) -> list[Tensor]:
        ranks = list(range(world_size))
        mesh = DeviceMesh.from_group(group, "cpu", mesh=ranks, mesh_dim_names=("shard",))
        model = mlp(32, 4)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        return train_five(model, rank)

    dense = means_over(dist.group.WORLD)
    for name, dtype in (("int8", None), ("int8", torch.float16), ("none", None), ("fp8", None)):
        group = commhooks.process_group(name, least=1)
        errors = list(map(relative_error, means_over(group, dtype), dense))
        assert max(errors) == 0 if name == "none" else 0 < min(errors) < max(errors) < 0.06, name
        assert group.hook.calls == 3 * STEPS
    assert group.hook.ledger.wire_bytes < 0.4 * group.hook.ledger.dense_bytes


@on_ranks(2)
def test_a_reduce_scatter_that_is_not_compressed_warns_once(world_size: int) -> None:
    whole, part = torch.ones(world_size * 2000), torch.empty(2000)

    def expected(name: str, **options: Any) -> list[str]:
        group = commhooks.process_group(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                scatter(part, whole, group=group, **options)
        assert part.tolist() == [world_size if options.get("op") != dist.ReduceOp.MAX else 1] * 2000
        return [str(warning.message) for warning in caught]

    assert expected("none") == expected("int8", op=dist.ReduceOp.MAX) == []
    texts = {name: expected(name) for name in ("qsgd", "terngrad")}
    group = commhooks.process_group("int8")
    parts = list(whole.view(world_size, -1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dist.reduce_scatter(part, parts, group=group)
    texts["list"] = [str(warning.message) for warning in caught]
    for name, (text,) in texts.items():
        call = "reduce_scatter" if name == "list" else "reduce_scatter_tensor"
        assert text.startswith(f"{call} of 4000 entries")
        assert "is sent uncompressed" in text
        assert "commhooks.register(model, scheme)" in text
    small = torch.empty(10)
    scatter(small, whole[: 10 * world_size], group=group)
    assert group.hook.calls == 0
    # ``least`` is of the input, not of this rank's part.
    groups = [commhooks.process_group("int8", least=whole.numel() + more) for more in (0, 1)]
    for group in groups:
        scatter(part, whole, group=group)
    assert [group.hook.calls for group in groups] == [1, 0]


@on_ranks(2)
def test_a_group_runs_the_scheme_that_it_was_switched_to(world_size: int) -> None:
    whole, part = torch.ones(world_size * 2000), torch.empty(2000)
    group = commhooks.process_group("int8")
    scatter(part, whole, group=group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group.hook.switch("qsgd")
        scatter(part, whole, group=group)
        group.hook.switch("bf16")
        work = scatter(part, whole, group=group, async_op=True)
        work.wait()
        group.allreduce_coalesced([whole], opts=dist.AllreduceCoalescedOptions()).wait()
    warned = [str(warning.message).split(" of ")[0] for warning in caught]
    assert warned == ["reduce_scatter_tensor", "allreduce_coalesced"]
    assert group.hook.calls == 2  # with int8 and bf16
    assert [value.shape for value in work.get_future().value()] == [torch.Size([2000])]


@pytest.mark.parametrize("steps_before", [0, 1])
@on_ranks(2)
def test_a_module_of_replicate_is_registered_before_and_after_its_first_forward(
    rank: int, steps_before: int
) -> None:
    model, plain = composable(mlp(32, 4), **SMALL), wrapped()
    train(model, rank, range(steps_before), width=32)
    hook, other = (commhooks.register(value, "topk", ratio=0.1) for value in (model, plain))
    if not steps_before:
        with pytest.raises(RegistrationError, match="already has a hook"):
            commhooks.register(model, "topk")
    same = all(map(torch.equal, train_five(model, rank), train_five(plain, rank)))
    # Buckets after the first step, from which the hook may begin here, are others.
    assert same or steps_before
    assert hook.step == other.step == STEPS
    assert hook.residual("0.weight") is not None
    with pytest.raises(RegistrationError, match="already has a hook"):
        commhooks.register(model, "topk")


@on_ranks(2)
def test_a_parameter_that_replicate_does_not_average_warns_once(rank: int) -> None:
    module = mlp(32, 4)
    module.get_parameter("2.bias").requires_grad_(False)
    model = composable(module)
    commhooks.register(model, "int8")
    train(model, rank, range(1), width=32)
    model.get_parameter("2.bias").requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch(0, rank, 8, 32))
    assert [str(warning.message).split(" did not")[0] for warning in caught] == ["2.bias"]


@on_ranks(4)
def test_a_module_of_replicate_averages_over_its_mesh_or_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    group = mesh.get_group("dp")
    dense = train_five(wrapped(group), rank)
    for ranks in ({"device_mesh": mesh["dp"]}, {"process_group": group}):
        model = composable(mlp(32, 4), **SMALL, **ranks)
        hook = commhooks.register(model, "int8")
        assert 0 < worst_error(train_five(model, rank), dense) < 0.04
        assert hook.world_size == 2


def _connects(rank: int, world_size: int) -> list[str]:
    connected: list[str] = []
    gloo: Any = dist.ProcessGroupGloo
    gloo.supports_splitting = property(lambda backend: True)
    gloo.eager_connect_single_device = lambda backend, device: connected.append(str(device))
    inside: Any = dist.group.WORLD
    inside.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...)
    group = commhooks.process_group("int8")
    assert group._get_backend(torch.device("cpu")) is inside._get_backend(torch.device("cpu"))
    return connected


def test_the_backends_of_the_group_inside_are_not_connected_again() -> None:
    assert run_ranks(_connects, 2) == [[], []]


@on_ranks(2)
def test_replicas_may_be_made_before_their_parameters(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 8))
    hook = commhooks.fsdp.replicate(model, "int8", modules=model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    model(torch.full((2, 40), rank + 1.0)).sum().backward()
    assert hook.step == 1
    grad: Any = model[1].bias.grad
    torch.testing.assert_close(grad.full_tensor(), torch.full((8,), 2.0))
