"""Times each host with the scheme ``none`` beside the host itself, in turns.

Run ``python -m experiments.step_cost hosts``: two processes over Gloo, each with cores of its own;
a step is a forward and a backward pass of the character transformer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import commhooks
import ddp_core
from experiments.tools.processes import Send, run_ranks
from experiments.tools.tables import printed
from experiments.tools.tasks import CharTransformer
from experiments.tools.turns import in_turns, seconds_per_step

RANKS = 2
SEQUENCES = 32  # of 64 characters, per rank and step


def _ddp(with_hook: bool) -> nn.Module:
    model = DistributedDataParallel(CharTransformer(64))
    if with_hook:
        commhooks.register(model, "none")
    return model


def _core(with_hook: bool) -> nn.Module:
    model = ddp_core.DistributedDataParallel(CharTransformer(64))
    if with_hook:
        commhooks.register(model, "none")
    return model


def _sharded(mesh: Any) -> nn.Module:
    model: Any = CharTransformer(64)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2(with_hook: bool) -> nn.Module:
    model = _sharded(init_device_mesh("cpu", (RANKS,)))
    if with_hook:
        commhooks.register(model, "none")
    return model


def _replicated(with_hook: bool) -> nn.Module:
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=names)
    model = _sharded(mesh["shard"] if with_hook else mesh)
    if with_hook:
        commhooks.register(model, "none", replicate_group=mesh["replicate"])
    return model


def _fsdp1(with_hook: bool) -> nn.Module:
    built: Any = CharTransformer(64)
    policy = ModuleWrapPolicy({type(built.blocks[0])})
    model = FullyShardedDataParallel(
        built, device_id=torch.device("cpu"), auto_wrap_policy=policy, use_orig_params=True
    )
    if with_hook:
        commhooks.register(model, "none")
    return model


def _group(with_hook: bool) -> nn.Module:
    group = commhooks.process_group("none") if with_hook else None
    return DistributedDataParallel(CharTransformer(64), process_group=group)


def _composable(with_hook: bool) -> nn.Module:
    model: nn.Module = replicate(CharTransformer(64))
    if with_hook:
        commhooks.register(model, "none")
    return model


def _replicated_by_fsdp2(with_hook: bool) -> nn.Module:
    model: Any = CharTransformer(64)
    if with_hook:
        commhooks.fsdp.replicate(model, "none", modules=model.blocks)
        return model
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        replicate_by_fsdp2(block, mesh=mesh)
    return replicate_by_fsdp2(model, mesh=mesh)


HOSTS: dict[str, Callable[[bool], nn.Module]] = {
    "torch's DDP": _ddp,
    "ddp_core": _core,
    "FSDP2": _fsdp2,
    "HSDP, one shard": _replicated,
    "FSDP1": _fsdp1,
    "process_group": _group,
    "replicate(), composable": _composable,
    "replicate() of FSDP2, hosts.replicate": _replicated_by_fsdp2,
}


def time_hosts(rank: int, world_size: int, send: Send, pairs: int) -> None:
    """Times all hosts in a process; rank 0 sends a row for each."""
    tokens = torch.randint(0, 128, (SEQUENCES, 64), generator=torch.Generator().manual_seed(rank))
    for name, build in HOSTS.items():
        calls = {}
        for with_hook in (False, True):
            torch.manual_seed(0)
            step = partial(_step, build(with_hook), tokens)
            for _ in range(5):
                step()
            calls[with_hook] = partial(seconds_per_step, step)
        # Neighbours in time: the machine's speed drifts within seconds.
        times = in_turns(calls, pairs)
        ratios = [pair[True] / pair[False] for pair in times]
        if rank == 0:
            spread = statistics.median(abs(ratio - statistics.median(ratios)) for ratio in ratios)
            send(
                {
                    "host": name,
                    "step_ms": 1e3 * statistics.median(pair[False] for pair in times),
                    "with_none": statistics.median(ratios),
                    "added_ms": 1e3 * statistics.median(p[True] - p[False] for p in times),
                    "standard_error": 1.48 * 1.25 * spread / pairs**0.5,
                }
            )


def _step(model: nn.Module, tokens: Tensor) -> None:
    model(tokens).square().mean().backward()
    model.zero_grad()


def main(
    pairs: Annotated[int, typer.Option(min=5, help="Of steps: without and with.")] = 100,
    out: Annotated[Path, typer.Option(help="The table.")] = Path("results/step_cost/hosts.csv"),
) -> None:
    """Prints the step time with ``none`` over the host's own."""
    rows = run_ranks(time_hosts, RANKS, pairs, own_cores=True)
    printed(list(track(rows, "hosts", total=len(HOSTS))), out)
