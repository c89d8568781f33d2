"""A process group that runs a scheme, and data parallelism on FSDP2 by one."""

from __future__ import annotations

import inspect
import re
import threading
import warnings
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
from commhooks.hosts._process_group import SchemeGroup
from tests.tools.harness import run_ranks
from tests.tools.training import batch, gradients, mlp, outcome

STEPS = 5
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SMALL = {"bucket_cap_mb": 0.004}  # several buckets, some of them of equal size


def train(model: nn.Module, rank: int, steps: int = STEPS, first: int = 0) -> list[Tensor]:
    """Gradients of each step."""
    means = []
    for step in range(first, first + steps):
        model.zero_grad()
        model(batch(step, rank, 8, 32)).square().sum().backward()
        means.append(gradients(model))
    return means


def local_means(model: nn.Module, rank: int) -> list[Tensor]:
    """This rank's pieces of the averaged gradients of each step, flat, of a model of FSDP2."""
    means = []
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step, rank, 8, 32)).square().sum().backward()
        grads: list[Any] = [parameter.grad for parameter in model.parameters()]
        means.append(torch.cat([grad.to_local().double().view(-1) for grad in grads]))
    return means


def wrapped(group: Any = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(mlp(32, 4), process_group=group, **{**SMALL, **options})


# ---- what passes


def _passes(rank: int, world_size: int) -> dict[str, Any]:
    group = commhooks.process_group("int8", least=100)
    outcomes: dict[str, Any] = {
        "backend": dist.get_backend(group) == "commhooks",
        "ranks": dist.get_process_group_ranks(group) == list(range(world_size)),
        "size": (group.rank(), group.size()) == (rank, world_size),
        "name": group.group_name != dist.group.WORLD.group_name,
        "mesh": init_device_mesh("cpu", (world_size,)).get_group() is dist.group.WORLD,
    }
    inputs = torch.randn(5000, generator=torch.Generator().manual_seed(rank))

    def both(call: Any) -> bool:
        results = []
        for place in (group, None):
            tensor = inputs.clone()
            results.append(call(tensor, place))
        return torch.equal(*results)

    def reduced(tensor: Tensor, place: Any, **options: Any) -> Tensor:
        dist.all_reduce(tensor, group=place, **options)
        return tensor

    def broadcast(tensor: Tensor, place: Any) -> Tensor:
        dist.broadcast(tensor, 0, group=place)
        return tensor

    def gathered(tensor: Tensor, place: Any) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(parts, tensor, group=place)
        return torch.cat(parts)

    def all_to_all(tensor: Tensor, place: Any) -> Tensor:
        into, n = torch.empty(world_size * 100), world_size * 100
        dist.all_to_all_single(into, tensor[:n].clone(), group=place)
        return into

    def sent(tensor: Tensor, place: Any) -> Tensor:
        if rank == 0:
            dist.send(tensor, 1, group=place)
        elif rank == 1:
            dist.recv(tensor, 0, group=place)
        return tensor

    outcomes |= {
        "max": both(lambda t, g: reduced(t, g, op=dist.ReduceOp.MAX)),
        "whole": both(lambda t, g: reduced((t * 100).long(), g)),
        "small": both(lambda t, g: reduced(t[:99].clone(), g)),
        "broadcast": both(broadcast),
        "all_gather": both(gathered),
        "all_to_all": both(all_to_all),
        "send": both(sent),
    }
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, {"rank": rank}, group=group)
    outcomes["objects"] = everyone == [{"rank": value} for value in range(world_size)]
    dist.barrier(group=group)
    outcomes["nothing compressed"] = group.hook.calls == 0

    plain, ours = inputs.clone(), inputs.clone()
    dist.all_reduce(plain)
    work = dist.all_reduce(ours, group=group, async_op=True)
    outcomes["waits"] = work.wait()
    outcomes["compressed"] = 0 < float((plain - ours).norm() / plain.norm()) < 0.02
    mean = reduced(inputs.clone(), group, op=dist.ReduceOp.AVG)
    outcomes["mean"] = float((plain / world_size - mean).norm() / mean.norm()) < 0.02
    outcomes["ledger"] = (
        group.hook.calls == 2 and group.hook.ledger.dense_bytes == 2 * inputs.nbytes
    )
    return outcomes


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_but_large_sums_of_floats_passes_as_it_is(ranks: int) -> None:
    for results in run_ranks(_passes, ranks):
        assert all(results.values()), results


class _Complex(nn.Module):
    """A layer of complex numbers, and one of reals."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(32, 64, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(64, 32))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(torch.complex64) @ self.first).abs() @ self.second


def _complex(rank: int, world_size: int) -> dict[str, bool]:
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

    def all_reduced(given: Tensor, place: Any) -> Tensor:
        dist.all_reduce(given, group=place)
        return given

    calls = {
        "all_reduce": lambda place: all_reduced(tensor.clone(), place),
        "slice": lambda place: all_reduced(tensor.clone().view(50, 60)[3:47], place),
        "inference": torch.inference_mode()(lambda place: all_reduced(tensor.clone(), place)),
        "of reals": lambda place: all_reduced(
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
    return {name: torch.equal(call(group), call(plain)) for name, call in calls.items()}


def test_complex_numbers_travel_exactly() -> None:
    for results in run_ranks(_complex, 2):
        assert all(results.values()), results


def _subgroups(rank: int, world_size: int) -> list[Any]:
    """Groups of groups, one after the other, and of ranks of which only some come."""
    sums: list[Any] = []
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    inside = pairs[rank // 2]
    for _ in range(3):
        group = commhooks.process_group("int8", inside)
        tensor = torch.full((2000,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        sums.append(round(float(tensor.mean()), 1))
        dist.destroy_process_group(group)
        lanes = [thread for thread in threading.enumerate() if thread.name == "commhooks-lanes"]
        for lane in lanes:
            lane.join(10)
        sums.append(any(thread.is_alive() for thread in lanes))
    return sums


def test_a_group_of_some_ranks_is_made_again_and_again() -> None:
    assert run_ranks(_subgroups, 3) == [[3.0, False] * 3] * 3


def _own_scheme(rank: int, world_size: int) -> dict[str, bool]:
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
        means.append(local_means(model, rank))
    return {
        "function": torch.equal(by_function, total),
        "collectives": torch.equal(by_object, total),
        "hook": all(map(torch.equal, *means)),
        "alone": group.hook.calls == 0,
    }


def test_what_has_a_scheme_of_its_own_runs_it_alone_over_a_group() -> None:
    for results in run_ranks(_own_scheme, 2):
        assert all(results.values()), results


# ---- DistributedDataParallel without a hook


STATELESS: dict[str, dict[str, Any]] = {
    "int8": {"rounding": "nearest", "error_feedback": False},
    "fp16": {},
    "bf16": {"fp32_sum": True},
    "fp8": {"format": "mx_e4m3", "error_feedback": False},
}


BLOCKS = ("int8", "fp8")


def _stateless(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, options in STATELESS.items():
        model = wrapped(commhooks.process_group(name, least=1, **options))
        other = wrapped()
        commhooks.register(other, name, **options)
        pairs = list(zip(train(model, rank), train(other, rank), strict=True))
        # A group does not know the parameters, where the hook's blocks begin.
        apart = [float((left - right).norm() / right.norm()) for left, right in pairs]
        results[name] = max(apart) < (0.05 if name in BLOCKS else 1e-9)
    seeds = [
        train(wrapped(commhooks.process_group("int8", least=1, seed=value)), rank, 1)
        for value in (0, 0, 1)
    ]
    results["seed"] = torch.equal(seeds[0][0], seeds[1][0])
    results["another seed"] = not torch.equal(seeds[0][0], seeds[2][0])
    model = wrapped(commhooks.process_group("int8", least=1))
    dense = train(wrapped(), rank)
    results["near"] = all(
        float((value - other).norm() / other.norm()) < 0.04
        for value, other in zip(train(model, rank), dense, strict=True)
    )
    core = ddp_core.DistributedDataParallel(mlp(32, 4), process_group=model.process_group)
    results["core"] = float((train(core, rank)[0] - dense[0]).norm() / dense[0].norm()) < 0.04
    results["core calls"] = core.process_group is model.process_group
    return results


def test_two_ranks_without_a_hook_get_what_a_hook_gives() -> None:
    for results in run_ranks(_stateless, 2):
        assert all(results.values()), results


# ---- what is refused


def _refusals(rank: int, world_size: int) -> dict[str, Any]:
    group = commhooks.process_group("int8")
    others = dist.new_group([0, 1])
    results = {
        "memory": outcome(commhooks.process_group, "topk"),
        "switch": outcome(group.hook.switch, "topk"),
        "hook": outcome(commhooks.register, wrapped(group), "int8"),
        "twice": outcome(commhooks.process_group, "int8", group),
        "own": outcome(dist.new_group, backend="commhooks"),
        "least": outcome(commhooks.process_group, "int8", least=100 * (rank + 1)),
        "unknown": outcome(commhooks.process_group, "int7"),
    }
    dist.barrier()  # a rank that ends closes what the other still connects
    results["changed"] = outcome(group.hook.change_group, others)
    return results


EXPECTED = {
    "memory": ("RegistrationError", "commhooks.register(model, scheme)"),
    "switch": ("RegistrationError", "keeps state by parameter"),
    "hook": ("RegistrationError", "runs a scheme already"),
    "twice": ("RegistrationError", "runs in it already"),
    "own": ("RegistrationError", "commhooks.process_group(scheme, group)"),
    "least": ("MismatchError", "least"),
    "unknown": ("UnknownSchemeError", "int8"),
    "changed": ("RegistrationError", "process_group(scheme, group)"),
}


def test_what_a_group_cannot_do_is_refused_with_what_to_do() -> None:
    for results in run_ranks(_refusals, 2):
        for what, (kind, text) in EXPECTED.items():
            assert results[what] is not None, what
            assert results[what][0] == kind, (what, results[what])
            assert text in results[what][1], (what, results[what])


# ---- data parallelism on FSDP2


def _on_fsdp(rank: int, world_size: int) -> dict[str, Any]:
    dense = train(DistributedDataParallel(mlp(32, 4)), rank)
    results: dict[str, Any] = {}

    def near(means: list[Tensor], allowed: float) -> bool:
        pairs = zip(means, dense, strict=True)
        return all(float((left - right).norm() / right.norm()) <= allowed for left, right in pairs)

    group = commhooks.process_group("int8", least=1)
    mesh = DeviceMesh.from_group(
        group, "cpu", mesh=list(range(world_size)), mesh_dim_names=("replicate",)
    )
    model = mlp(32, 4)
    for module in (model[0], model[2], model):
        on_fsdp(module, mesh=mesh)
    results["over the group"] = (
        near(local_means(model, rank), 0.04) and group.hook.calls == 3 * STEPS
    )

    for name, allowed in {"none": 1e-6, "int8": 0.04, "powersgd": 3.0}.items():
        model = mlp(32, 4)
        hook = commhooks.fsdp.replicate(model, name, modules=[model[0], model[2]])
        means = local_means(model, rank)
        results[name] = near(means, allowed) and (hook.step, hook.calls) == (STEPS, 3 * STEPS)
        results.setdefault("bits", []).append(means[-1])
    results["wrong mesh"] = outcome(commhooks.fsdp.replicate, mlp(), "none", mesh=mesh)
    return results


def test_replicas_on_fsdp2_average_by_a_scheme() -> None:
    everyone = run_ranks(_on_fsdp, 2, ignore_warnings=(".*is deprecated.*",))
    bits = [results.pop("bits") for results in everyone]
    for local, outcomes in zip(bits, everyone, strict=True):
        assert all(map(torch.equal, local, bits[0]))
        assert outcomes.pop("wrong mesh")[0] == "RegistrationError"
        assert all(outcomes.values()), outcomes


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


def _sharded(rank: int, world_size: int) -> dict[str, Any]:
    ranks = list(range(world_size))

    def model_over(group: Any, dtype: Any = None) -> nn.Module:
        mesh = DeviceMesh.from_group(group, "cpu", mesh=ranks, mesh_dim_names=("shard",))
        model = mlp(32, 4)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        return model

    dense, results = local_means(model_over(dist.group.WORLD), rank), {}
    for name, dtype in (("int8", None), ("int8", torch.float16), ("none", None), ("fp8", None)):
        group = commhooks.process_group(name, least=1)
        means = local_means(model_over(group, dtype), rank)
        errors = [
            float((mean - exact).norm() / exact.norm())
            for mean, exact in zip(means, dense, strict=True)
        ]
        near = max(errors) == 0 if name == "none" else 0 < min(errors) < max(errors) < 0.06
        results[f"{name} {dtype}"] = near and group.hook.calls == 3 * STEPS
    ledger = group.hook.ledger
    results["bytes"] = ledger.wire_bytes < 0.4 * ledger.dense_bytes
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_fully_shard_over_a_group_is_compressed(ranks: int) -> None:
    for results in run_ranks(_sharded, ranks):
        assert all(results.values()), results


def _not_scattered(rank: int, world_size: int) -> dict[str, Any]:
    whole, part = torch.ones(world_size * 2000), torch.empty(2000)

    def told(name: str, **options: Any) -> list[str]:
        group = commhooks.process_group(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                scatter(part, whole, group=group, **options)
        assert part.tolist() == [world_size if options.get("op") != dist.ReduceOp.MAX else 1] * 2000
        return [str(warning.message) for warning in caught]

    results = {name: told(name) for name in ("qsgd", "terngrad", "none")}
    results["largest"] = told("int8", op=dist.ReduceOp.MAX)
    group = commhooks.process_group("int8")
    parts = list(whole.view(world_size, -1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dist.reduce_scatter(part, parts, group=group)
    results["list"] = [str(warning.message) for warning in caught]
    small = torch.empty(10)
    scatter(small, whole[: 10 * world_size], group=group)
    results["compressed"] = group.hook.calls
    # ``least`` is of the input, not of this rank's part.
    groups = [commhooks.process_group("int8", least=whole.numel() + more) for more in (0, 1)]
    for group in groups:
        scatter(part, whole, group=group)
    results["large enough"] = [group.hook.calls for group in groups]
    return results


def test_a_reduce_scatter_that_is_not_compressed_is_told_once() -> None:
    for results in run_ranks(_not_scattered, 2):
        assert results["none"] == results["largest"] == []
        for name in ("qsgd", "terngrad", "list"):
            (text,) = results[name]
            call = "reduce_scatter" if name == "list" else "reduce_scatter_tensor"
            assert text.startswith(f"{call} of 4000 entries")
            assert "is sent uncompressed" in text
            assert "commhooks.register(model, scheme)" in text
        assert results["compressed"] == 0
        assert results["large enough"] == [1, 0]


def _switched(rank: int, world_size: int) -> dict[str, Any]:
    whole, part = torch.ones(world_size * 2000), torch.empty(2000)
    group = commhooks.process_group("int8")
    results: dict[str, Any] = {}
    scatter(part, whole, group=group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group.hook.switch("qsgd")
        scatter(part, whole, group=group)
        group.hook.switch("bf16")
        work = scatter(part, whole, group=group, async_op=True)
        work.wait()
        group.allreduce_coalesced([whole], opts=dist.AllreduceCoalescedOptions()).wait()
    results["told"] = [str(warning.message).split(" of ")[0] for warning in caught]
    results["calls"] = group.hook.calls
    results["value"] = [value.shape for value in work.get_future().value()]
    return results


def test_a_group_runs_the_scheme_that_it_was_switched_to() -> None:
    for results in run_ranks(_switched, 2):
        assert results["told"] == ["reduce_scatter_tensor", "allreduce_coalesced"]
        assert results["calls"] == 2  # with int8 and bf16
        assert results["value"] == [torch.Size([2000])]


def _composable(rank: int, world_size: int) -> dict[str, bool]:
    results = {}
    for when in ("before", "after"):
        model = composable(mlp(32, 4), **SMALL)
        if when == "after":
            train(model, rank, 1)
        hook = commhooks.register(model, "topk", ratio=0.1)
        plain = wrapped()
        other = commhooks.register(plain, "topk", ratio=0.1)
        pairs = [train(model, rank), train(plain, rank)]
        near = [float((left - right).norm()) for left, right in zip(*pairs, strict=True)]
        # Buckets after the first step, from which the hook may begin here, are others.
        results[when] = max(near) == 0 if when == "before" else hook.step == STEPS
        results[f"{when} kept"] = (hook.residual("0.weight") is not None) and other.step == STEPS
        again = outcome(commhooks.register, model, "topk")
        results[f"{when} twice"] = again is not None and "already has a hook" in again[1]
    model = composable(mlp(32, 4))
    commhooks.register(model, "topk")
    again = outcome(commhooks.register, model, "topk")
    results["twice before the first step"] = again is not None and "already has a hook" in again[1]
    return results


def test_a_module_of_replicate_is_registered_before_and_after_its_first_forward() -> None:
    for results in run_ranks(_composable, 2):
        assert all(results.values()), results


def _unfrozen(rank: int, world_size: int) -> list[str]:
    module = mlp(32, 4)
    module.get_parameter("2.bias").requires_grad_(False)
    model = composable(module)
    commhooks.register(model, "int8")
    train(model, rank, 1)
    model.get_parameter("2.bias").requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(batch(0, rank, 8, 32))
    return [str(warning.message) for warning in caught]


def test_a_parameter_that_replicate_does_not_average_is_told_once() -> None:
    for result in run_ranks(_unfrozen, 2):
        assert [value.split(" did not")[0] for value in result] == ["2.bias"]


def _composable_among_some(rank: int, world_size: int) -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    group = mesh.get_group("dp")
    dense = train(wrapped(group), rank, 2)
    results = {}
    for name, ranks in {
        "mesh": {"device_mesh": mesh["dp"]},
        "group": {"process_group": group},
    }.items():
        model = composable(mlp(32, 4), **SMALL, **ranks)
        hook = commhooks.register(model, "int8")
        means = train(model, rank, 2)
        near = [
            float((mean - exact).norm() / exact.norm())
            for mean, exact in zip(means, dense, strict=True)
        ]
        results[name] = 0 < max(near) < 0.04 and hook.world_size == 2
    return results


def test_a_module_of_replicate_averages_over_its_mesh_or_group() -> None:
    for results in run_ranks(_composable_among_some, 4):
        assert all(results.values()), results


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


def _elsewhere(rank: int, world_size: int) -> Tensor:
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
    return grad.full_tensor()  # type: ignore[no-any-return]


def test_replicas_may_be_made_before_their_parameters() -> None:
    for results in run_ranks(_elsewhere, 2):
        torch.testing.assert_close(results, torch.full((8,), 2.0))
