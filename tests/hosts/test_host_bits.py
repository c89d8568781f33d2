"""Hosts whose buckets are laid out alike give gradients of the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from commhooks.core._scheme import slots_of
from commhooks.hosts.megatron import ReduceScatter
from commhooks.verify._judge import error_bound_of
from tests.tools.harness import run_ranks
from tests.tools.training import batch, mlp

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
SHAPE, STEPS = (32, 64), 2  # rows of a weight in two shards, without padding
QUIET = (".*FSDP", ".*deprecated", ".*NO_SHARD")
SCHEMES: dict[str, Scheme] = {
    "none": commhooks.make("none"),
    "bf16": commhooks.make("bf16"),
    "int8": commhooks.make("int8"),
    "int8, to nearest": commhooks.make("int8", rounding="nearest", error_feedback=False),
    "topk": commhooks.make("topk", ratio=0.1),
    "powersgd": commhooks.make("powersgd", rank=2),
}
Host = Callable[[Scheme, nn.Module], nn.Module]  # returns the model that trains
Called = Callable[[Tensor, Tensor], Any]  # reduces a gradient into the second tensor
Caller = Callable[[Scheme], Called]


def given(step: int, rank: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    """The gradient of the weight."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


def reduced(model: nn.Module, rank: int, shape: tuple[int, int] = SHAPE) -> list[Tensor]:
    """The gradients of each step: whole, or this rank's shards."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        (model(torch.eye(shape[1])).t() * given(step, rank, shape)).sum().backward()
        found.append(_flat(model))
    return found


def _flat(model: nn.Module) -> Tensor:
    """The gradients that this rank has, one after the other."""
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    local = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    # FSDP1 leaves a parameter without a gradient whose shard is on the other rank.
    return torch.cat([grad.detach().reshape(-1) for grad in local if grad is not None])


def called(call: Called, rank: int, *, shards: int) -> list[Tensor]:
    found = []
    for step in range(STEPS):
        gradient = given(step, rank).view(-1) if shards > 1 else given(step, rank)
        into = gradient if shards == 1 else torch.empty(gradient.numel() // shards)
        call(gradient, into)
        found.append(into.reshape(-1))
    return found


# ---- hosts that give each rank the whole mean


def torch_ddp(scheme: Scheme, net: nn.Module) -> nn.Module:
    model = DistributedDataParallel(net)
    commhooks.register(model, scheme)
    return model


def core_ddp(scheme: Scheme, net: nn.Module) -> nn.Module:
    model = ddp_core.DistributedDataParallel(net)
    commhooks.register(model, scheme)
    return model


def composable_ddp(scheme: Scheme, net: nn.Module) -> nn.Module:
    model = composable(net)
    commhooks.register(model, scheme)
    return model


def group(scheme: Scheme, net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, process_group=commhooks.process_group(scheme))


def on_fsdp_over_group(scheme: Scheme, net: nn.Module) -> nn.Module:
    made, ranks = commhooks.process_group(scheme), list(range(dist.get_world_size()))
    mesh = DeviceMesh.from_group(made, "cpu", mesh=ranks, mesh_dim_names=("replicate",))
    return on_fsdp(net, mesh=mesh)


def replicated(scheme: Scheme, net: nn.Module) -> nn.Module:
    commhooks.fsdp.replicate(net, scheme)
    return net


def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def between(scheme: Scheme, net: nn.Module) -> nn.Module:
    mesh = _mesh(dist.get_world_size(), 1)
    fully_shard(net, mesh=mesh["shard"])
    commhooks.register(net, scheme, replicate_group=mesh["replicate"])
    return net


def _fsdp1(net: nn.Module, strategy: str) -> nn.Module:
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(net, sharding_strategy=ShardingStrategy[strategy], **options)


def fsdp1_whole(scheme: Scheme, net: nn.Module) -> nn.Module:
    model = _fsdp1(net, "NO_SHARD")
    commhooks.register(model, scheme)
    return model


def collectives(scheme: Scheme) -> Called:
    made = commhooks.Collectives(scheme)
    return lambda x, _: made.all_reduce(x, "weight", op=AVG)


def function(scheme: Scheme) -> Called:
    return lambda x, _: commhooks.all_reduce(x, scheme, op=AVG)


# ---- hosts that give each rank its shard of the mean


def fsdp2(scheme: Scheme, net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    commhooks.register(net, scheme)
    return net


def inside(scheme: Scheme, net: nn.Module) -> nn.Module:
    mesh = _mesh(1, dist.get_world_size())
    fully_shard(net, mesh=mesh["shard"])
    commhooks.register(net, "none", replicate_group=mesh["replicate"])
    commhooks.register(net, scheme)
    return net


def fsdp1(scheme: Scheme, net: nn.Module) -> nn.Module:
    model = _fsdp1(net, "FULL_SHARD")
    commhooks.register(model, scheme)
    return model


def scattering(scheme: Scheme) -> Called:
    made = commhooks.Collectives(scheme)
    return lambda x, part: made.reduce_scatter(part, x, "weight", op=AVG)


def scattering_function(scheme: Scheme) -> Called:
    return lambda x, part: commhooks.reduce_scatter(part, x, scheme, op=AVG)


def megatron(scheme: Scheme) -> Called:
    call = ReduceScatter(scheme)
    return lambda x, part: call(part, x, AVG, None, False)


# The first host of each kind is the one that the others are compared with.
WHOLE: dict[str, Host] = {
    "torch's DDP": torch_ddp,
    "ddp_core": core_ddp,
    "composable replicate()": composable_ddp,
    "process_group": group,
    "replicate() on FSDP2, over a group": on_fsdp_over_group,
    "hosts.replicate": replicated,
    "between nodes": between,
    "FSDP1, NO_SHARD": fsdp1_whole,
}
WHOLE_CALLS: dict[str, Caller] = {
    "Collectives.all_reduce": collectives,
    "all_reduce": function,
}
SHARDS: dict[str, Host] = {
    "FSDP2": fsdp2,
    "FSDP2, in a mesh with between": inside,
    "FSDP1": fsdp1,
}
SHARD_CALLS: dict[str, Caller] = {
    "Collectives.reduce_scatter": scattering,
    "reduce_scatter": scattering_function,
    "Megatron-Core": megatron,
}
# These do not know the parameter's name, which memory belongs to.
NAMELESS = {
    *("process_group", "replicate() on FSDP2, over a group"),
    *("all_reduce", "reduce_scatter", "Megatron-Core"),
}
# Random bits are keyed by names: that of the parameter, in FSDP2 that of its first piece
# ("weight#0"), without one that of the call. So these draw others than the first of their kind.
DRAW_OTHERS = {*NAMELESS, "FSDP1", "Collectives.reduce_scatter"}
RANDOM = {"int8"}
# An all-reduce of codes rounds the mean, too; a shard has the largest entries of its own.
DIFFERENT_HALVES = {"int8", "int8, to nearest", "topk"}


def run_on(scheme: Scheme, host: str) -> bool:
    """Whether a host takes a scheme."""
    shards = host in SHARDS or host in SHARD_CALLS
    if slots_of(scheme) and host in NAMELESS:
        return False
    return scheme.traits.shards or not shards


Found = dict[str, list[Tensor]]  # gradients of each step, by host


def _all_hosts(scheme: Scheme, rank: int, world_size: int) -> Found:
    found = {}
    for name, host in {**WHOLE, **SHARDS}.items():
        if run_on(scheme, name):
            found[name] = reduced(host(scheme, nn.Linear(*SHAPE[::-1], bias=False)), rank)
    for name, call in {**WHOLE_CALLS, **SHARD_CALLS}.items():
        if run_on(scheme, name):
            shards = 1 if name in WHOLE_CALLS else world_size
            found[name] = called(call(scheme), rank, shards=shards)
    return found


def gradient(step: int, rank: int, shape: tuple[int, int] = SHAPE, bias: bool = False) -> Tensor:
    """What autograd gives on a rank, flat."""
    weight = given(step, rank, shape)
    return torch.cat([weight.view(-1), weight.sum(1)]) if bias else weight.view(-1)


def check_law(scheme: Scheme, found: Tensor, exact: Tensor, size: float, host: str) -> None:
    """The error is within what the scheme declares, of the larger gradient of both ranks."""
    law = error_bound_of(scheme, 2)
    assert law.rounding is not None
    assert (found - exact).norm() <= (law.rounding + law.variance**0.5) * size, host


def check_one_layout(name: str, ranks: Sequence[Found]) -> None:
    """Hosts of one layout give the same bits."""
    scheme = SCHEMES[name]
    both = [[gradient(step, rank) for rank in range(2)] for step in range(STEPS)]
    for rank, found in enumerate(ranks):
        wholes, shards = found["torch's DDP"], found.get("FSDP2")
        parts = [whole.chunk(2)[rank] for whole in wholes]
        for host, means in found.items():
            sharded = host in SHARDS or host in SHARD_CALLS
            if name in RANDOM and host in DRAW_OTHERS:
                for mean, (one, other) in zip(means, both, strict=True):
                    exact, size = (one + other) / 2, max(float(one.norm()), float(other.norm()))
                    check_law(scheme, mean, exact.chunk(2)[rank] if sharded else exact, size, host)
            else:
                wanted = shards if sharded else wholes
                assert wanted is not None
                assert all(map(torch.equal, means, wanted)), (name, host)
        if shards is not None:
            assert all(map(torch.equal, shards, parts)) == (name not in DIFFERENT_HALVES), name
        dense = [(one + other) / 2 for one, other in both]
        assert any(map(torch.equal, wholes, dense)) == (name == "none"), name


# ---- a bias and an odd number of rows, which hosts lay out and fill up each in its own way

ODD = (33, 64)
CUT = 17 * ODD[1]  # entries of the weight in FSDP2's first shard
# Each entry by itself, or each matrix.
WHATEVER_LAYOUT = ("none", "bf16", "powersgd")


def _odd(scheme: Scheme, rank: int) -> Found:
    return {
        name: reduced(host(scheme, nn.Linear(*ODD[::-1])), rank, ODD)
        for name, host in {**WHOLE, **SHARDS}.items()
        if run_on(scheme, name)
    }


def whole(host: str, first: Tensor, second: Tensor) -> Tensor:
    """The gradient, of what both ranks have."""
    if host not in SHARDS:
        assert torch.equal(first, second)
        return first
    if host == "FSDP1":  # one flat tensor, cut anywhere
        return torch.cat([first, second])
    rest = ODD[0] * ODD[1] - CUT
    return torch.cat([first[:CUT], second[:rest], first[CUT:], second[rest:]])


def check_other_layouts(name: str, ranks: Sequence[Found]) -> None:
    """Hosts of other layouts have the error of the scheme."""
    scheme = SCHEMES[name]
    for step in range(STEPS):
        one, other = (gradient(step, rank, ODD, bias=True) for rank in range(2))
        wanted, size = (one + other) / 2, max(float(one.norm()), float(other.norm()))
        means = {host: whole(host, *(rank[host][step] for rank in ranks)) for host in ranks[0]}
        for host, mean in means.items():
            if name in WHATEVER_LAYOUT:
                assert torch.equal(mean, means["torch's DDP"]), (name, host, step)
            else:
                check_law(scheme, mean, wanted, size, host)


# All in one start of the ranks, which takes as long as the steps of one scheme.
def _by_schemes(rank: int, world_size: int) -> dict[str, tuple[Found, Found]]:
    odd = {*WHATEVER_LAYOUT, "int8"}
    return {
        name: (_all_hosts(scheme, rank, world_size), _odd(scheme, rank) if name in odd else {})
        for name, scheme in SCHEMES.items()
    }


@pytest.mark.slow
def test_hosts_of_one_layout_give_the_same_bits_and_others_have_the_error_of_the_scheme() -> None:
    ranks = run_ranks(_by_schemes, 2, ignore_warnings=QUIET)
    for name in SCHEMES:
        alike, odd = zip(*(found[name] for found in ranks), strict=True)
        check_one_layout(name, alike)
        check_other_layouts(name, odd)


# ---- without a scheme: the bits of the host itself


def _trained(model: nn.Module, rank: int) -> list[Tensor]:
    found = []
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step, rank, 8, 32)).square().sum().backward()
        found.append(_flat(model))
    return found


def _models(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    """Gradients of each host with "none", and by itself."""
    found = {}
    ours, plain = mlp(32, 4), mlp(32, 4)
    commhooks.fsdp.replicate(ours, modules=[ours[0], ours[2]])  # type: ignore[index]
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",))
    for module in (plain[0], plain[2], plain):  # type: ignore[index]
        on_fsdp(module, mesh=mesh)
    found["hosts.replicate"] = [_trained(model, rank) for model in (ours, plain)]

    for strategy in ("FULL_SHARD", "NO_SHARD"):
        ours, plain = (_fsdp1(mlp(32, 4), strategy) for _ in range(2))
        commhooks.register(ours, "none")
        found[f"FSDP1, {strategy}"] = [_trained(model, rank) for model in (ours, plain)]

    small: Any = {"bucket_cap_mb": 0.004}
    ours, plain = (composable(mlp(32, 4), **small) for _ in range(2))
    commhooks.register(ours, "none")
    found["composable replicate()"] = [_trained(model, rank) for model in (ours, plain)]
    return found


def _calls(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """What calls with "none" give, and torch's function."""
    made = commhooks.Collectives()
    x = torch.randn(world_size * 500, generator=torch.Generator().manual_seed(rank))
    found = {}
    for name, op in (("sum", SUM), ("mean", AVG)):
        calls: dict[str, Any] = {
            "torch": lambda y, op=op: dist.all_reduce(y, op),
            "Collectives": lambda y, op=op: made.all_reduce(y, op=op),
            "function": lambda y, op=op: commhooks.all_reduce(y, op=op),
        }
        scatters: dict[str, Any] = {
            "torch": lambda part, op=op: dist.reduce_scatter_tensor(part, x, op),
            "Collectives": lambda part, op=op: made.reduce_scatter(part, x, op=op),
            "function": lambda part, op=op: commhooks.reduce_scatter(part, x, op=op),
            "Megatron-Core": lambda part, op=op: ReduceScatter("none")(part, x, op, None, False),
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


# Gloo divides after the sum, as FSDP2's all-reduce and ``ReduceOp.AVG`` ask it to, and FSDP1, too,
# but for a power of two. With "none" each rank multiplies by 1/n before the sum, as
# DistributedDataParallel does, unless it gets a part only. Powers of two are exact.
DIVIDES_LATER = {"hosts.replicate", "mean", "FSDP1, NO_SHARD"}


def _without_a_scheme(rank: int, world_size: int) -> Any:
    return _models(rank, world_size), _calls(rank, world_size)


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_scheme_hosts_and_calls_give_their_own_bits(ranks: int) -> None:
    for models, calls in run_ranks(_without_a_scheme, ranks, ignore_warnings=QUIET):
        for host, (ours, own) in models.items():
            same = near if host in DIVIDES_LATER and ranks == 3 else torch.equal
            assert all(map(same, ours, own)), host
        for call, (wanted, *others) in calls.items():
            same = near if call in DIVIDES_LATER and ranks == 3 else torch.equal
            assert all(same(one, wanted) for one in others), call
