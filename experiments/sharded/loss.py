"""Trains the character transformer sharded, with schemes, and compares it with DDP in bf16.

Run ``python -m experiments.sharded loss``. Four processes over Gloo; the same batches and seeds in
every case; continues an interrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.wrappers import AveragedFeedback
from experiments.tools.intervals import interval
from experiments.tools.processes import run_ranks
from experiments.tools.tasks import CharTransformer, characters

BASE = "DDP, bf16"
RANKS = 4
POWERSGD = {"rank": 4, "start_step": 10}  # as in experiments.convergence


def _sharded(model: CharTransformer, mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _four_bits() -> commhooks.Scheme:
    return AveragedFeedback(commhooks.make("int4", error_feedback=False))


def _ddp(model: nn.Module, seed: int) -> nn.Module:
    ddp = DistributedDataParallel(model)
    commhooks.register(ddp, "bf16", seed=seed)
    return ddp


def _fsdp2(scheme: Callable[[], Any]) -> Callable[[Any, int], nn.Module]:
    def build(model: Any, seed: int) -> nn.Module:
        sharded = _sharded(model, init_device_mesh("cpu", (RANKS,)))
        commhooks.register(sharded, scheme(), seed=seed)
        return sharded

    return build


def _hsdp(model: Any, seed: int) -> nn.Module:
    """Returns SDP4Bit's two levels: 8 bits within a node, 4 bits with feedback between nodes."""
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    sharded = _sharded(model, mesh["shard"])
    commhooks.register(sharded, "int8", seed=seed)
    commhooks.register(sharded, _four_bits(), replicate_group=mesh["replicate"], seed=seed)
    return sharded


def _replicated(rank: int) -> Callable[[Any, int], nn.Module]:
    """Returns DDP by FSDP2: sharded over one rank, replicated over all."""

    def build(model: Any, seed: int) -> nn.Module:
        mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
        sharded = _sharded(model, mesh["shard"])
        settings = {**POWERSGD, "rank": rank}
        commhooks.register(
            sharded, "powersgd", replicate_group=mesh["replicate"], seed=seed, **settings
        )
        return sharded

    return build


def _ddp_powersgd(model: nn.Module, seed: int) -> nn.Module:
    ddp = DistributedDataParallel(model)
    commhooks.register(ddp, "powersgd", seed=seed, **POWERSGD)
    return ddp


CASES: dict[str, Callable[[Any, int], nn.Module]] = {
    BASE: _ddp,
    "FSDP2, none": _fsdp2(lambda: "none"),
    "FSDP2, int8": _fsdp2(lambda: "int8"),
    "FSDP2, int4, 8-bit feedback": _fsdp2(_four_bits),
    "HSDP, int8 inside, int4 between": _hsdp,
    "replicate, powersgd rank 4": _replicated(4),
    "replicate, powersgd rank 8": _replicated(8),
    "DDP, powersgd rank 4": _ddp_powersgd,  # the same scheme without the host
}


def train(
    rank: int,
    world_size: int,
    send: Callable[[Any], None],
    runs: list[tuple[str, int]],
    steps: int,
) -> None:
    """Trains each case in a process; rank 0 sends losses."""
    for name, seed in runs:
        task = characters(world_size, seed=seed)
        torch.manual_seed(seed)
        model = CASES[name](task.model(), seed)
        optimizer = task.optimizer(model)
        for step in range(steps):
            optimizer.zero_grad()
            x, target = task.batch(rank, step)
            task.loss(model(x), target).backward()
            optimizer.step()
            if rank == 0 and (step + 1) % 16 == 0:
                send({"steps": 16})
        loss, _ = task.evaluate(model)
        dist.barrier()
        if rank == 0:
            send({"case": name, "seed": seed, "steps": steps, "loss": loss})


def gaps(losses: pd.DataFrame) -> pd.DataFrame:
    """Returns each case's loss over that of DDP in bf16 with the same seed, with an interval."""
    base = losses[losses.case == BASE].set_index("seed").loss
    rows = []
    for name, some in losses.groupby("case", sort=False):
        mean, half = interval((some.set_index("seed").loss - base).dropna().tolist())
        rows.append(
            {
                "case": name,
                "loss": some.loss.mean(),
                "gap": mean,
                "gap_half_width": half,
                "seeds": len(some),
            }
        )
    return pd.DataFrame(rows)


def main(
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    steps: Annotated[int, typer.Option(min=16)] = 384,
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("results/sharded"),
) -> None:
    """Prints losses and their gaps to DDP in bf16."""
    begin, console = time.perf_counter(), Console()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "losses.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    have = {(row["case"], row["seed"]) for row in rows if row["steps"] == steps}
    runs = [(name, seed) for seed in range(seeds) for name in CASES if (name, seed) not in have]
    columns = (TextColumn("{task.description}"), BarColumn(18), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("losses", total=len(runs) * steps)
        for message in run_ranks(train, RANKS, runs, steps) if runs else ():
            if "loss" in message:
                rows.append(message)
                pd.DataFrame(rows).to_csv(path, index=False, float_format="%.5f")
            else:
                progress.update(bar, advance=message["steps"])
    losses = pd.DataFrame(rows)
    table = gaps(losses[losses.steps == steps])
    table.to_csv(out / "quality.csv", index=False, float_format="%.4f")
    console.print(table.to_string(index=False, float_format="{:.4f}".format))
    console.print(f"{time.perf_counter() - begin:.0f} s; wrote {out}")
