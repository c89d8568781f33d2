"""Which scheme runs on which host: runs every cell, and writes the page that shows them.

``python -m tests.hosts.host_matrix`` writes ``docs/integrations/matrix.md``; a test compares.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from commhooks.hosts.megatron import ReduceScatter
from tests.frameworks.versions import PAGE, section
from tests.shelf import BUILT_IN
from tests.tools.harness import run_ranks

STEPS = 2
SKIPPED = {"allreduce"}  # another name of "none"
OPTIONS: dict[str, dict[str, Any]] = {"powersgd": {"rank": 2}, "onebit_adam": {"freeze_step": 1}}


def scheme_names() -> list[str]:
    return [name for name in BUILT_IN if name not in SKIPPED]


def made(name: str) -> Any:
    return commhooks.make(name, **OPTIONS.get(name, {}))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def train(net: nn.Module) -> None:
    for step in range(STEPS):
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        net(inputs).square().sum().backward()
        for parameter in net.parameters():
            grad: Any = parameter.grad
            if grad is not None:
                local = grad.to_local() if hasattr(grad, "to_local") else grad
                assert local.isfinite().all()
            parameter.grad = None


# ---- hosts: each runs a scheme for some steps, or raises


def torch_ddp(name: str) -> None:
    net = DistributedDataParallel(model())
    commhooks.register(net, made(name))
    train(net)


def core_ddp(name: str) -> None:
    net = ddp_core.DistributedDataParallel(model())
    commhooks.register(net, made(name))
    train(net)


def composable(name: str) -> None:
    net = replicate(model())
    commhooks.register(net, made(name))
    train(net)


def group(name: str) -> None:
    group = commhooks.process_group(made(name))
    train(DistributedDataParallel(model(), process_group=group))


def on_fsdp2(name: str) -> None:
    group, ranks = commhooks.process_group(made(name)), list(range(dist.get_world_size()))
    mesh = DeviceMesh.from_group(group, "cpu", mesh=ranks, mesh_dim_names=("replicate",))
    train(replicate_with_fsdp(model(), mesh=mesh))


def replicated(name: str) -> None:
    net = model()
    commhooks.fsdp.replicate(net, made(name), modules=[net[0]])  # type: ignore[index]
    train(net)


def _sharded() -> nn.Module:
    net, mesh = model(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)  # type: ignore[index]
    fully_shard(net, mesh=mesh)
    return net


def fsdp2(name: str) -> None:
    net = _sharded()
    commhooks.register(net, made(name))
    train(net)


def _hsdp() -> tuple[nn.Module, DeviceMesh]:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)
    net = model()
    fully_shard(net, mesh=mesh["shard"])
    return net, mesh["replicate"]


def hsdp(name: str) -> None:
    net, nodes = _hsdp()
    commhooks.register(net, made(name), replicate_group=nodes)
    train(net)


def hsdp_inside(name: str) -> None:
    net, nodes = _hsdp()
    commhooks.register(net, "none", replicate_group=nodes)
    commhooks.register(net, made(name))
    train(net)


def gathers(name: str) -> None:
    net = _sharded()
    commhooks.fsdp.gather_parameters(net, name)
    train(net)


def _fsdp1(name: str, strategy: ShardingStrategy) -> None:
    net = FullyShardedDataParallel(
        model(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
    )
    commhooks.register(net, made(name))
    train(net)


def fsdp1(name: str) -> None:
    _fsdp1(name, ShardingStrategy.FULL_SHARD)


def fsdp1_whole(name: str) -> None:
    _fsdp1(name, ShardingStrategy.NO_SHARD)


def _zero(**options: Any) -> None:
    net = ddp_core.DistributedDataParallel(model())
    optimizer = commhooks.ZeroOptimizer(net, torch.optim.SGD, lr=1e-3, **options)
    for _ in range(STEPS):
        net(torch.ones(8, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def zero(name: str) -> None:
    _zero(scheme=made(name))


def zero_gathers(name: str) -> None:
    _zero(gather=name)


def diloco(name: str) -> None:
    net = model()
    outer = commhooks.DiLoCo(net, made(name), every=1)
    for _ in range(STEPS):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(0.01)
        outer.step()
    outer.close()


def _tensor() -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


def all_reduce(name: str) -> None:
    for _ in range(STEPS):
        commhooks.all_reduce(_tensor(), made(name))


def collectives(name: str) -> None:
    found = commhooks.Collectives(made(name))
    for _ in range(STEPS):
        found.all_reduce(_tensor(), "tensor")
    found.close()


def reduce_scatter(name: str) -> None:
    found, part = commhooks.Collectives(made(name)), 64 * 64 // dist.get_world_size()
    for _ in range(STEPS):
        found.reduce_scatter(torch.empty(part), _tensor().view(-1), "tensor")
    found.close()


def reduce_scatter_function(name: str) -> None:
    part = 64 * 64 // dist.get_world_size()
    for _ in range(STEPS):
        commhooks.reduce_scatter(torch.empty(part), _tensor().view(-1), made(name))


def all_gather_function(name: str) -> None:
    for _ in range(STEPS):
        whole = torch.empty(dist.get_world_size() * 64 * 64)
        commhooks.all_gather(whole, _tensor().view(-1), made(name))


def all_gather(name: str) -> None:
    found, ranks = commhooks.Collectives(made(name)), dist.get_world_size()
    for _ in range(STEPS):
        found.all_gather(torch.empty(ranks * 64 * 64), _tensor().view(-1), "tensor")
    found.close()


def megatron(name: str) -> None:
    call, whole = ReduceScatter(made(name)), _tensor().view(-1)
    for _ in range(STEPS):
        call(whole.chunk(2)[dist.get_rank()], whole, dist.ReduceOp.SUM, dist.group.WORLD, False)


# By table: what runs a scheme, and the number of ranks.
TABLES: dict[str, dict[str, tuple[Callable[[str], None], int]]] = {
    "Gradients of a model": {
        "torch's DDP": (torch_ddp, 2),
        "`ddp_core`": (core_ddp, 2),
        "`replicate()`, composable": (composable, 2),
        "`process_group`": (group, 2),
        "`replicate()` on FSDP2, over a `process_group`": (on_fsdp2, 2),
        "`fsdp.replicate` (FSDP2)": (replicated, 2),
        "FSDP2": (fsdp2, 2),
        "HSDP, between nodes": (hsdp, 4),
        "HSDP, within nodes": (hsdp_inside, 4),
        "FSDP1": (fsdp1, 2),
        "FSDP1, `NO_SHARD`": (fsdp1_whole, 2),
        "`ZeroOptimizer`": (zero, 2),
        "Megatron-Core": (megatron, 2),
    },
    "Parameters, and tensors of your own": {
        "`gather_parameters` (FSDP2)": (gathers, 2),
        "`ZeroOptimizer`, `gather=`": (zero_gathers, 2),
        "`DiLoCo`": (diloco, 2),
        "`all_reduce`": (all_reduce, 2),
        "`reduce_scatter`": (reduce_scatter_function, 2),
        "`all_gather`": (all_gather_function, 2),
        "`Collectives.all_reduce`": (collectives, 2),
        "`Collectives.reduce_scatter`": (reduce_scatter, 2),
        "`Collectives.all_gather`": (all_gather, 2),
    },
}
HOSTS = {host: how for table in TABLES.values() for host, how in table.items()}

# Why a host refuses a scheme: what its error says, and a few words for the page.
REASONS = {
    "weights": (
        ("different weights",),
        "keeps state, draws random bits or drops entries: forward and backward would not have the "
        "same, or the right, weights",
    ),
    "bits": (("fewer than 4 bits",), "has too few bits for parameters themselves"),
    "coarse": (
        ("would grow",),
        "rounds so coarsely that what is not sent would grow; `eden` runs with 2 bits or more",
    ),
    "whole": (("averages whole",), "exchanges whole buckets, not shards of them"),
    "memory": (("keeps state",), "keeps state, which belongs to tensors with names"),
    "payload": (("no payload", "does not pack"), "has no payload of one rank's tensor alone"),
    "other": (
        ("returns no mean", "something else", "another result"),
        "returns something else than the average, or not the same to all ranks",
    ),
}


def outcomes(rank: int, world_size: int, host: str) -> dict[str, str]:
    """Returns for each scheme "" if it runs, or why the host refuses it."""
    found = {}
    for name in scheme_names():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                HOSTS[host][0](name)
            found[name] = ""
        except (commhooks.errors.RegistrationError, commhooks.errors.SchemeError, ValueError) as e:
            found[name] = str(e)
        dist.barrier()
    return found


def matrix() -> dict[str, dict[str, str]]:
    """Runs all cells; returns reasons by host and scheme, empty where a scheme runs."""
    quiet = (".*",)
    return {
        host: run_ranks(outcomes, world_size, host, timeout=240, ignore_warnings=quiet)[0]
        for host, (_, world_size) in HOSTS.items()
    }


def reason_of(text: str) -> str:
    """Returns the key of the reason in the text of an error; "" if it is another one."""
    return next(
        (key for key, (parts, _) in REASONS.items() if any(part in text for part in parts)), ""
    )


def page_of(found: dict[str, dict[str, str]]) -> str:
    """Returns the page."""
    keys = list(dict.fromkeys(reason_of(text) for row in found.values() for text in row.values()))
    keys = [key for key in keys if key]
    lines = [
        "# Every scheme in every integration",
        "",
        *section(PAGE.read_text(encoding="utf-8")),
        "",
        "## Schemes",
        "",
        "Each cell was run on the torch of `constraints.txt` ([tested versions]"
        "(../index.md#versions-of-torch)): two ranks (four for HSDP) over Gloo, two steps.",
        "A check mark: it runs.",
        "A number: it is refused when it is registered or called, for this reason:",
        "",
        *(f"{number}. The scheme {REASONS[key][1]}." for number, key in enumerate(keys, 1)),
    ]
    for table, hosts_of_table in TABLES.items():
        lines += [
            "",
            f"### {table}",
            "",
            "| scheme | " + " | ".join(hosts_of_table) + " |",
            "|---|" + "---|" * len(hosts_of_table),
        ]
        for name in scheme_names():
            texts = [found[host][name] for host in hosts_of_table]
            cells = [str(keys.index(reason_of(text)) + 1) if text else "✓" for text in texts]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += [
        "",
        "DistributedDataParallel asks a group for sums, FSDP2 for averages, so that `noop` and",
        "`signsgd` run there.",
        "`gather_parameters` and `gather=` were given the name of the scheme, which is then made",
        "without error feedback, and rounds to nearest. Megatron-Core's adapter is called here",
        "as Megatron-Core calls it; a hook of `commhooks.hosts.torchft.register` is one on torch's",
        "DDP.",
        "`python -m tests.hosts.host_matrix` writes this page, and a test compares it with",
        "what runs.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    results = matrix()
    for host, row in results.items():
        for name, text in row.items():
            if text and not reason_of(text):
                print(f"{host}, {name}: {text}")
    PAGE.write_text(page_of(results), encoding="utf-8")
    print(f"wrote {PAGE}")
