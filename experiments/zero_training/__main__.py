"""Compares training with a sharded optimizer and codes both ways to plain training with bf16.

Run ``python -m experiments.zero_training``. Trains the character transformer with AdamW from
several seeds on Gloo processes. ``gap`` is the final loss on held-out data minus that of bf16 with
the same seed: mean and range of the seeds. ``bytes`` is what a rank sends in a step over what it
sends with bf16. ``state`` is the optimizer's numbers per parameter on one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

import commhooks
from ddp_core import DistributedDataParallel
from experiments.tools.processes import run_ranks
from experiments.tools.tasks import characters

BASE = "bf16"
# Gradients, new values, and whether buckets are stepped in backward.
HOWS = {
    "none, none": ("none", "none", False),
    "int8, none": ("int8", "none", False),
    "int8, int8": ("int8", "int8", False),
    "int8, int8, in backward": ("int8", "int8", True),
    "int8, int4": ("int8", "int4", True),
    "int4, int4": ("int4", "int4", True),
}


def train(rank: int, world_size: int, send: Any, how: str, seed: int, steps: int) -> None:
    """Trains once; rank 0 sends loss, bytes per step and size of the optimizer's state."""
    torch.set_num_threads(1)
    task = characters(world_size, length=32, seed=seed)
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model())
    optimizer: torch.optim.Optimizer
    if how == BASE:
        hook = commhooks.register(model, how)
        optimizer = task.optimizer(model)
    else:
        scheme, gather, in_backward = HOWS[how]
        optimizer = commhooks.ZeroOptimizer(
            *(model, torch.optim.AdamW),
            scheme=scheme,
            gather=gather,
            in_backward=in_backward,
            seed=seed,
            lr=task.lr,
        )
        hook = optimizer.hook
    for step in range(steps):
        x, target = task.batch(rank, step)
        task.loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim())
    if rank == 0:
        loss, _ = task.evaluate(model.module)
        numel = sum(parameter.numel() for parameter in model.parameters())
        send((how, seed, loss, hook.ledger.wire_bytes / steps, kept / numel))


def main(
    seeds: Annotated[int, typer.Option(help="Runs of each.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 400,
    world_size: Annotated[int, typer.Option(help="Gloo processes.", min=2)] = 2,
    out: Annotated[Path, typer.Option(help="The table.")] = Path("results/zero_training.csv"),
) -> None:
    """Prints the table."""
    rows = []
    for seed in range(seeds):
        for how in (BASE, *HOWS):
            rows += list(run_ranks(train, world_size, how, seed, steps))
            print(*rows[-1], sep="  ", flush=True)  # a study that is stopped has shown something
    table = pd.DataFrame(rows, columns=["how", "seed", "loss", "bytes", "state"])
    base = table[table.how == BASE].set_index("seed")
    table["gap"] = table.loss - table.seed.map(base.loss)
    table["bytes"] /= table.seed.map(base.bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    groups = table.groupby("how", sort=False)
    summary = groups[["loss", "gap", "bytes", "state"]].mean()
    summary.insert(2, "least gap", groups.gap.min())
    summary.insert(3, "largest gap", groups.gap.max())
    print(summary.round(4).to_string())


if __name__ == "__main__":
    typer.run(main)
