"""Hosts whose buckets are laid out alike give gradients of the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as composable
from torch.distributed._composable.replicate_with_fsdp import replicate as on_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks import Scheme
from commhooks.core.scheme import slots_of
from commhooks.hook.verdict import law_of
from commhooks.hosts import torchcomms as torchcomms_backend
from commhooks.hosts.megatron import ReduceScatter
from tests.distributed import comms
from tests.distributed.harness import run_ranks
from tests.distributed.training import batch, mlp

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
SHAPE, STEPS = (32, 64), 3  # rows of a weight in two shards, without padding
QUIET = (".*FSDP", ".*deprecated", ".*NO_SHARD")
SCHEMES: dict[str, Scheme] = {
    "none": commhooks.make("none"),
    "bf16": commhooks.make("bf16"),
    "int8": commhooks.make("int8"),
    "int8, to nearest": commhooks.make("int8", stochastic=False, error_feedback=False),
    "topk": commhooks.make("topk", ratio=0.1),
    "powersgd": commhooks.make("powersgd", rank=2),
}
Host = Callable[[Scheme, int], list[Tensor]]


def given(step: int, rank: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + rank))


def layer() -> nn.Linear:
    return nn.Linear(SHAPE[1], SHAPE[0], bias=False)


def reduced(model: nn.Module, rank: int) -> list[Tensor]:
    """The gradients of each step: whole, or this rank's shard. Before, they are what is given."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        (model(torch.eye(SHAPE[1])).t() * given(step, rank)).sum().backward()
        (parameter,) = model.parameters()
        grad: Any = parameter.grad
        local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
        found.append(local.detach().reshape(-1).clone())
    return found


def called(rank: int, call: Callable[[Tensor, Tensor], None], shards: int) -> list[Tensor]:
    """The same of a call that reduces its first argument into the second."""
    found = []
    for step in range(STEPS):
        gradient = given(step, rank)
        into = gradient if shards == 1 else torch.empty(gradient.numel() // shards)
        call(gradient, into)
        found.append(into.reshape(-1))
    return found


# ---- hosts that give each rank the whole mean


def torch_ddp(scheme: Scheme, rank: int) -> list[Tensor]:
    model = DistributedDataParallel(layer())
    commhooks.register(model, scheme)
    return reduced(model, rank)


def core_ddp(scheme: Scheme, rank: int) -> list[Tensor]:
    model = ddp_core.DistributedDataParallel(layer())
    commhooks.register(model, scheme)
    return reduced(model, rank)


def composable_ddp(scheme: Scheme, rank: int) -> list[Tensor]:
    model = composable(layer())
    commhooks.register(model, scheme)
    return reduced(model, rank)


def _in_group(group: Any, rank: int, attached: bool) -> list[Tensor]:
    model = DistributedDataParallel(layer(), process_group=group)
    if attached:
        group.attach(model)
    return reduced(model, rank)


def group(scheme: Scheme, rank: int) -> list[Tensor]:
    return _in_group(commhooks.process_group(scheme), rank, False)


def attached_group(scheme: Scheme, rank: int) -> list[Tensor]:
    return _in_group(commhooks.process_group(scheme), rank, True)


def backend(scheme: Scheme, rank: int) -> list[Tensor]:
    commhooks.register_backend(scheme)
    return _in_group(dist.new_group(backend="commhooks"), rank, False)


def attached_backend(scheme: Scheme, rank: int) -> list[Tensor]:
    commhooks.register_backend(scheme)
    return _in_group(dist.new_group(backend="commhooks"), rank, True)


def on_fsdp_over_group(scheme: Scheme, rank: int) -> list[Tensor]:
    ranks = list(range(dist.get_world_size()))
    names = ("replicate",)
    made = commhooks.process_group(scheme)
    mesh = DeviceMesh.from_group(made, "cpu", mesh=ranks, mesh_dim_names=names)
    return reduced(on_fsdp(layer(), mesh=mesh), rank)


def replicated(scheme: Scheme, rank: int) -> list[Tensor]:
    model = layer()
    commhooks.hosts.replicate(model, scheme)
    return reduced(model, rank)


def between(scheme: Scheme, rank: int) -> list[Tensor]:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)
    model = fully_shard(layer(), mesh=mesh["shard"])
    commhooks.register(model, scheme, between=mesh["replicate"])
    return reduced(model, rank)


def _fsdp1(scheme: Scheme, rank: int, strategy: ShardingStrategy) -> list[Tensor]:
    device = torch.device("cpu")
    options = {"sharding_strategy": strategy, "device_id": device, "use_orig_params": True}
    model = FullyShardedDataParallel(layer(), **options)  # type: ignore[arg-type]
    commhooks.register(model, scheme)
    return reduced(model, rank)


def fsdp1_whole(scheme: Scheme, rank: int) -> list[Tensor]:
    return _fsdp1(scheme, rank, ShardingStrategy.NO_SHARD)


def collectives(scheme: Scheme, rank: int) -> list[Tensor]:
    made = commhooks.Collectives(scheme)
    return called(rank, lambda x, _: made.all_reduce(x, "weight", op=AVG), 1)


def function(scheme: Scheme, rank: int) -> list[Tensor]:
    return called(rank, lambda x, _: commhooks.all_reduce(x, scheme, op=AVG), 1)


def _comm(scheme: Scheme) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        stand = comms.Stand(patch)
        torchcomms_backend.register_backend(scheme)
        return stand.new_comm("commhooks")


def torchcomms(scheme: Scheme, rank: int) -> list[Tensor]:
    comm = _comm(scheme)
    return called(rank, lambda x, _: comm.all_reduce(x, comms.AVG, False), 1)


# ---- hosts that give each rank its shard of the mean


def fsdp2(scheme: Scheme, rank: int) -> list[Tensor]:
    model = fully_shard(layer(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    commhooks.register(model, scheme)
    return reduced(model, rank)


def inside(scheme: Scheme, rank: int) -> list[Tensor]:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
    model = fully_shard(layer(), mesh=mesh["shard"])
    commhooks.register(model, "none", between=mesh["replicate"])
    commhooks.register(model, scheme)
    return reduced(model, rank)


def fsdp1(scheme: Scheme, rank: int) -> list[Tensor]:
    return _fsdp1(scheme, rank, ShardingStrategy.FULL_SHARD)


def scattering(scheme: Scheme, rank: int) -> list[Tensor]:
    made = commhooks.Collectives(scheme)
    return called(rank, lambda x, part: made.reduce_scatter(part, x, "weight", op=AVG), 2)


def scattering_function(scheme: Scheme, rank: int) -> list[Tensor]:
    return called(rank, lambda x, part: commhooks.reduce_scatter(part, x, scheme, op=AVG), 2)


def megatron(scheme: Scheme, rank: int) -> list[Tensor]:
    call = ReduceScatter(scheme)
    return called(rank, lambda x, part: call(part, x.view(-1), AVG, None, False), 2)


def torchcomms_shards(scheme: Scheme, rank: int) -> list[Tensor]:
    comm = _comm(scheme)
    return called(
        rank, lambda x, part: comm.reduce_scatter_single(part, x.view(-1), comms.AVG, False), 2
    )


# Each group's first host is the one that the others are compared with.
WHOLE: dict[str, Host] = {
    "torch's DDP": torch_ddp,
    "ddp_core": core_ddp,
    "composable replicate()": composable_ddp,
    "process_group": group,
    "process_group, attached": attached_group,
    "backend": backend,
    "backend, attached": attached_backend,
    "replicate() on FSDP2, over a group": on_fsdp_over_group,
    "hosts.replicate": replicated,
    "between nodes": between,
    "FSDP1, NO_SHARD": fsdp1_whole,
    "Collectives.all_reduce": collectives,
    "all_reduce": function,
    "torchcomms": torchcomms,
}
SHARDS: dict[str, Host] = {
    "FSDP2": fsdp2,
    "FSDP2, in a mesh with between": inside,
    "FSDP1": fsdp1,
    "Collectives.reduce_scatter": scattering,
    "reduce_scatter": scattering_function,
    "Megatron-Core": megatron,
    "torchcomms, shards": torchcomms_shards,
}
# These do not know the parameter's name.
NAMELESS = {
    *("process_group", "backend", "replicate() on FSDP2, over a group", "all_reduce", "torchcomms"),
    *("reduce_scatter", "Megatron-Core", "torchcomms, shards"),
}
# Random bits are keyed by names: that of the parameter, in FSDP2 that of its first piece
# ("weight#0"), without one that of the call. So these draw others than the first of their group.
DRAW_OTHERS = {*NAMELESS, "FSDP1", "Collectives.reduce_scatter"}
RANDOM = {"int8"}
# An all-reduce of codes rounds the mean, too; a shard has the largest entries of its own.
DIFFERENT_HALVES = {"int8", "int8, to nearest", "topk"}


def hosts_of(scheme: Scheme) -> dict[str, Host]:
    hosts = {**WHOLE, **(SHARDS if scheme.traits.shards else {})}
    memory = bool(slots_of(scheme))
    return {name: host for name, host in hosts.items() if not (memory and name in NAMELESS)}


def _all_hosts(rank: int, world_size: int, scheme: Scheme) -> dict[str, list[Tensor]]:
    return {name: host(scheme, rank) for name, host in hosts_of(scheme).items()}


def check_law(scheme: Scheme, means: list[Tensor], rank: int, host: str) -> None:
    law = law_of(scheme, 2)
    assert law.rounding is not None
    for step, mean in enumerate(means):
        grads = [given(step, one).view(-1) for one in range(2)]
        size = max(float(grad.norm()) for grad in grads)
        exact = sum(grads, torch.zeros(())) / 2
        if mean.numel() < exact.numel():
            exact = exact.chunk(2)[rank]
        assert (mean - exact).norm() <= (law.rounding + law.variance**0.5) * size, (host, step)


@pytest.mark.parametrize("name", SCHEMES)
def test_hosts_of_one_layout_give_the_same_bits(name: str) -> None:
    scheme = SCHEMES[name]
    for rank, found in enumerate(run_ranks(_all_hosts, 2, scheme, ignore_warnings=QUIET)):
        wholes, shards = found["torch's DDP"], found.get("FSDP2")
        for host, means in found.items():
            if name in RANDOM and host in DRAW_OTHERS:
                check_law(scheme, means, rank, host)
                continue
            wanted = wholes if host in WHOLE else shards
            assert wanted is not None
            assert all(map(torch.equal, means, wanted)), host
        parts = [whole.chunk(2)[rank] for whole in wholes]
        if shards is not None:
            assert all(map(torch.equal, shards, parts)) == (name not in DIFFERENT_HALVES)
        dense = [(given(step, 0) + given(step, 1)).view(-1) / 2 for step in range(STEPS)]
        assert any(map(torch.equal, wholes, dense)) == (name == "none")


# ---- without a scheme: the bits of the host itself


def _trained(model: nn.Module, rank: int) -> list[Tensor]:
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step, rank, 8, 32)).square().sum().backward()
        grads: list[Any] = [parameter.grad for parameter in model.parameters()]
        local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        found.append(torch.cat([grad.view(-1) for grad in local]))
    return found


def _models(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    """Gradients of each host with "none", and by itself."""
    found = {}
    ours, plain = mlp(32, 4), mlp(32, 4)
    commhooks.hosts.replicate(ours, modules=[ours[0], ours[2]])  # type: ignore[index]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    for module in (plain[0], plain[2], plain):  # type: ignore[index]
        on_fsdp(module, mesh=mesh)
    found["hosts.replicate"] = [_trained(model, rank) for model in (ours, plain)]

    small: Any = {"bucket_cap_mb": 0.004}
    ours, plain = (composable(mlp(32, 4), **small) for _ in range(2))
    commhooks.register(ours, "none")
    found["composable replicate()"] = [_trained(model, rank) for model in (ours, plain)]

    commhooks.register_backend("none", least=1)
    groups = [dist.new_group(backend=name) for name in ("commhooks", "gloo")]
    models = [DistributedDataParallel(mlp(32, 4), process_group=one, **small) for one in groups]
    found["backend"] = [_trained(model, rank) for model in models]
    return found


def _calls(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """What calls with "none" give, and torch's function."""
    comm, made = _comm(SCHEMES["none"]), commhooks.Collectives()
    x = torch.randn(world_size * 500, generator=torch.Generator().manual_seed(rank))
    found = {}
    for name, of_torch, of_comm in (("sum", SUM, comms.SUM), ("mean", AVG, comms.AVG)):
        calls: dict[str, Any] = {
            "torch": lambda y, op=of_torch: dist.all_reduce(y, op),
            "torchcomms": lambda y, op=of_comm: comm.all_reduce(y, op, False),
            "Collectives": lambda y, op=of_torch: made.all_reduce(y, op=op),
            "function": lambda y, op=of_torch: commhooks.all_reduce(y, op=op),
        }
        scatters: dict[str, Any] = {
            "torch": lambda part, op=of_torch: dist.reduce_scatter_tensor(part, x, op),
            "torchcomms": lambda part, op=of_comm: comm.reduce_scatter_single(part, x, op, False),
            "Collectives": lambda part, op=of_torch: made.reduce_scatter(part, x, op=op),
            "function": lambda part, op=of_torch: commhooks.reduce_scatter(part, x, op=op),
            "Megatron-Core": lambda part, op=of_torch: ReduceScatter("none")(
                part, x, op, None, False
            ),
        }
        results = {who: x.clone() for who in calls}, {who: torch.empty(500) for who in scatters}
        for kind, one in zip((calls, scatters), results, strict=True):
            for who, call in kind.items():
                call(one[who])
        found[name], found[f"{name} of a part"] = (
            [one.pop("torch"), *one.values()] for one in results
        )
    return found


def near(one: Tensor, other: Tensor) -> bool:
    """Whether they differ by a few roundings."""
    return float((one - other).norm()) < 4 * 2**-24 * float(other.norm())


# Gloo divides after the sum, as FSDP2's all-reduce and ``ReduceOp.AVG`` ask it to; with "none" each
# rank multiplies by 1/n before it, as DistributedDataParallel does. Powers of two are exact.
DIVIDES_LATER = {"hosts.replicate", "mean"}


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_scheme_hosts_give_their_own_bits(ranks: int) -> None:
    for found in run_ranks(_models, ranks, ignore_warnings=QUIET):
        for host, (ours, own) in found.items():
            same = near if host in DIVIDES_LATER and ranks == 3 else torch.equal
            assert all(map(same, ours, own)), host


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_scheme_calls_give_the_bits_of_torch(ranks: int) -> None:
    for found in run_ranks(_calls, ranks, ignore_warnings=QUIET):
        for call, (wanted, *others) in found.items():
            same = near if call in DIVIDES_LATER and ranks == 3 else torch.equal
            assert all(same(one, wanted) for one in others), call
