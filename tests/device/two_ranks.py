"""Workers of several ranks that share one GPU, or none; started by ``run_ranks``."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks.core._layout import Layout
from commhooks.hook._engine import Engine
from ddp_core import Streams, Task
from tests.device.device_cases import SCHEMES, SHAPES, given
from tests.device.host_cases import ALL

__all__ = ["all_reduced", "bodies_of_ranks", "group_of", "means_of_ranks", "simulated", "tolerance"]

STEPS = 3
NAMES = [f"p{i}" for i in range(len(SHAPES))]


def group_of(rank: int, backend: str) -> Any:
    """A group of all ranks; NCCL takes ranks on one GPU for two hosts, which it does not refuse."""
    if backend == "nccl":
        # It compares host and device of the ranks, and would take a path through shared memory.
        os.environ |= {
            "NCCL_HOSTID": str(rank),
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        torch.cuda.set_device(0)
    return dist.new_group(backend=backend)


def all_reduced(rank: int, world_size: int, backend: str, device: str) -> list[float]:
    group = group_of(rank, backend)
    tensor = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(tensor, group=group)
    return tensor[:3].tolist()


def means_of_ranks(
    rank: int, world_size: int, backend: str, device: str
) -> dict[str, list[Tensor]]:
    """Means of a bucket by every scheme, over real collectives."""
    group = group_of(rank, backend)
    streams, layout = Streams(group), Layout(NAMES, SHAPES)
    results = {}
    for name, (scheme, settings) in SCHEMES.items():
        engine = Engine(commhooks.make(scheme, **settings), rank=rank, world_size=world_size)
        results[name] = []
        for step in range(STEPS):
            gradient = torch.cat([value.flatten() for value in given(step, rank)]).to(device)
            engine.begin_bucket(0, is_last=True)
            task = Task(
                engine.exchange(gradient, layout),
                step=step,
                bucket=0,
                dense_bytes=gradient.nbytes,
                world_size=world_size,
                max_rounds=engine.traits.rounds,
            )
            results[name].append(streams.run(task, gradient.device).wait().cpu())
    return results


def simulated(world_size: int) -> dict[str, list[Tensor]]:
    """The same on the CPU, in one process."""
    results = {}
    for name, (scheme, settings) in SCHEMES.items():
        shapes = dict(zip(NAMES, SHAPES, strict=True))
        ranks = commhooks.Simulation(scheme, shapes, world_size=world_size, **settings)
        results[name] = [
            ranks.step(
                [
                    torch.cat([value.flatten() for value in given(step, rank)])
                    for rank in range(world_size)
                ]
            )[0].clone()
            for step in range(STEPS)
        ]
    return results


def tolerance(name: str, world_size: int) -> float:
    """Returns how far means may be from the simulation's: two numbers have one sum, more do not."""
    if world_size == 2:
        return 0.0
    return 3e-3 if "16" in name else 1e-5


def bodies_of_ranks(
    rank: int, world_size: int, backend: str, device: str, names: list[str]
) -> list[str]:
    """Bodies of these names, with that back end; says how far they have come."""
    group = group_of(rank, backend)
    for name in names:
        print(f"rank {rank}, {backend}: {name}", flush=True)
        ALL[name](device, group)
    return names
