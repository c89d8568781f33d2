"""Runs a scheme on every host: those that train a model, and those that are called.

A host of a model takes a scheme and a module, and returns what trains. A host of calls takes a
scheme and an op, and returns a function that reduces a tensor in place, or into a second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as composable_replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_on_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks import Scheme
from commhooks.core import Bucket
from commhooks.core._bucket import SchemeExchange
from commhooks.core._dense import Dense
from commhooks.hosts.megatron import ReduceScatter

Host = Callable[[Scheme, nn.Module], nn.Module]
Call = Callable[[Tensor, Tensor], Any]
Caller = Callable[[Scheme, Any], Call]  # with the kind of the reduction


def _first_and_all(net: nn.Module) -> list[nn.Module]:
    return [*list(net.children())[:1], net]


def sharded(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in _first_and_all(net):
        fully_shard(module, mesh=mesh)
    return net


def fsdp1(strategy: str, net: nn.Module) -> nn.Module:
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(net, sharding_strategy=ShardingStrategy[strategy], **options)


@dataclass(frozen=True)
class Elsewhere(Dense):
    """Returns the mean in memory of its own; the bucket's has something else."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from bucket.all_reduce()
        mean = result.mean.clone()
        result.mean.zero_()
        return result._replace(mean=mean)


# Those that a scheme is registered on, by what makes them of a module.
WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "torch's DDP": DistributedDataParallel,
    "`ddp_core`": ddp_core.DistributedDataParallel,
    "`replicate()`, composable": composable_replicate,
    "FSDP2": sharded,
    "FSDP1": partial(fsdp1, "FULL_SHARD"),
    "FSDP1, `NO_SHARD`": partial(fsdp1, "NO_SHARD"),
}


def registered(host: str) -> Host:
    def trains(scheme: Scheme, net: nn.Module) -> nn.Module:
        model: nn.Module = WRAPS[host](net)
        commhooks.register(model, scheme)
        return model

    return trains


# ---- hosts that give each rank the whole mean


def group(scheme: Scheme, net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, process_group=commhooks.process_group(scheme))


def on_fsdp_over_group(scheme: Scheme, net: nn.Module) -> nn.Module:
    over, ranks = commhooks.process_group(scheme), list(range(dist.get_world_size()))
    mesh = DeviceMesh.from_group(over, "cpu", mesh=ranks, mesh_dim_names=("replicate",))
    return replicate_on_fsdp(net, mesh=mesh)


def replicated(scheme: Scheme, net: nn.Module) -> nn.Module:
    commhooks.fsdp.replicate(net, scheme, modules=_first_and_all(net)[:-1])
    return net


def _mesh(shards: int) -> DeviceMesh:
    sizes = dist.get_world_size() // shards, shards
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def between(scheme: Scheme, net: nn.Module) -> nn.Module:
    """Returns FSDP2 on two nodes, between which the scheme runs."""
    mesh = _mesh(dist.get_world_size() // 2)
    fully_shard(net, mesh=mesh["shard"])
    commhooks.register(net, scheme, replicate_group=mesh["replicate"])
    return net


def collectives(scheme: Scheme, op: Any) -> Call:
    calls = commhooks.Collectives(scheme)
    return lambda given, _: calls.all_reduce(given, "weight", op=op)


def function(scheme: Scheme, op: Any) -> Call:
    return lambda given, _: commhooks.all_reduce(given, scheme, op=op)


# ---- hosts that give each rank its shard of the mean


def inside(scheme: Scheme, net: nn.Module) -> nn.Module:
    """Returns FSDP2 on nodes of two ranks, within which the scheme runs."""
    mesh = _mesh(2)
    fully_shard(net, mesh=mesh["shard"])
    commhooks.register(net, "none", replicate_group=mesh["replicate"])
    commhooks.register(net, scheme)
    return net


def scattering(scheme: Scheme, op: Any) -> Call:
    calls = commhooks.Collectives(scheme)
    return lambda given, part: calls.reduce_scatter(part, given, "weight", op=op)


def scattering_function(scheme: Scheme, op: Any) -> Call:
    return lambda given, part: commhooks.reduce_scatter(part, given, scheme, op=op)


def megatron(scheme: Scheme, op: Any) -> Call:
    call = ReduceScatter(scheme)
    return lambda given, part: call(part, given, op, None, False)


# The first host of each kind is the one that the others are compared with.
WHOLE: dict[str, Host] = {
    "torch's DDP": registered("torch's DDP"),
    "`ddp_core`": registered("`ddp_core`"),
    "`replicate()`, composable": registered("`replicate()`, composable"),
    "`process_group`": group,
    "`replicate()` on FSDP2, over a `process_group`": on_fsdp_over_group,
    "`fsdp.replicate` (FSDP2)": replicated,
    "HSDP, between nodes": between,
    "FSDP1, `NO_SHARD`": registered("FSDP1, `NO_SHARD`"),
}
WHOLE_CALLS: dict[str, Caller] = {
    "`Collectives.all_reduce`": collectives,
    "`all_reduce`": function,
}
SHARDS: dict[str, Host] = {
    "FSDP2": registered("FSDP2"),
    "HSDP, within nodes": inside,
    "FSDP1": registered("FSDP1"),
}
SHARD_CALLS: dict[str, Caller] = {
    "`Collectives.reduce_scatter`": scattering,
    "`reduce_scatter`": scattering_function,
    "Megatron-Core": megatron,
}
MODELS = {  # as the page shows them
    host: (WHOLE | SHARDS)[host]
    for host in (
        *list(WHOLE)[:6],
        *("FSDP2", "HSDP, between nodes", "HSDP, within nodes", "FSDP1", "FSDP1, `NO_SHARD`"),
    )
}
# These do not know the parameter's name, which memory belongs to.
NAMELESS = {
    *("`process_group`", "`replicate()` on FSDP2, over a `process_group`"),
    *("`all_reduce`", "`reduce_scatter`", "Megatron-Core"),
}
