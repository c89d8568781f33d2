"""Trains a small model with each plan, and compares its loss with synchronous training in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
from rich.progress import Progress
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.slow_line.cells import Cell, made
from experiments.tools.intervals import interval
from experiments.tools.processes import run_ranks
from experiments.tools.tasks import Task, characters

__all__ = ["BASE", "PLANS", "gaps", "measured"]

BASE = Cell("ddp", "bf16", 1)
PLANS = (
    Cell("overlapped", "eden:bits=2", 128),
    Cell("overlapped", "powersgd:rank=4", 128),
    Cell("overlapped", "eden:bits=2", 32),
    Cell("overlapped", "powersgd:rank=4", 32),
    Cell("overlapped", "eden:bits=2", 8),
    Cell("overlapped", "powersgd:rank=4", 8),
    Cell("overlapped", "int4", 8),
    # What of a gap is due to local steps, and to averages that arrive late, without any codec.
    *(Cell(plan, "none", every) for every in (128, 32, 8) for plan in ("blocking", "overlapped")),
)
_TOLD = 16  # steps between two messages


class Run(NamedTuple):
    """Describes a training run."""

    cell: Cell
    seed: int
    steps: int


def train(rank: int, world_size: int, send: Callable[[Any], None], runs: list[Run]) -> None:
    """Trains each run in a process; rank 0 sends steps and losses."""
    tasks = {run.seed: characters(world_size, seed=run.seed) for run in runs}
    for run in runs:
        loss = _trained(run, tasks[run.seed], rank, send)
        if rank == 0:
            send({**run.cell.__dict__, "seed": run.seed, "steps": run.steps, "loss": loss})


def _trained(run: Run, task: Task, rank: int, send: Callable[[Any], None]) -> float:
    cell = run.cell
    torch.manual_seed(run.seed)
    model: torch.nn.Module = task.model()
    hook = outer = None
    if cell.plan == "ddp":
        model = DistributedDataParallel(model)
        hook = commhooks.register(model, made(cell.codec), seed=run.seed)
    else:
        outer = commhooks.DiLoCo(
            model,
            made(cell.codec),
            every=cell.every,
            delay=cell.delay,
            seed=run.seed,
        )
    optimizer = task.optimizer(model)
    for step in range(run.steps):
        optimizer.zero_grad()
        x, target = task.batch(rank, step)
        task.loss(model(x), target).backward()
        optimizer.step()
        if outer is not None:
            outer.step()
        if rank == 0 and (step + 1) % _TOLD == 0:
            send({"steps": _TOLD})
    if outer is not None:
        for pending in outer._pending:  # the last average would be applied after the end
            pending.future.wait()
        outer.close()
    if hook is not None:
        hook.close()
    # Local parameters differ between ranks; what a user keeps is their average.
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    return float(task.evaluate(plain)[0])


def measured(
    path: Path, *, seeds: int, steps: int, world_size: int, progress: Progress
) -> pd.DataFrame:
    """Returns the losses of all runs; writes each at once, and continues from the file."""
    runs = [Run(cell, seed, steps) for seed in range(seeds) for cell in (BASE, *PLANS)]
    if path.exists():
        have = {tuple(row) for row in pd.read_csv(path)[_KEYS].itertuples(index=False)}
        runs = [run for run in runs if (*run.cell.__dict__.values(), *run[1:]) not in have]
    bar = progress.add_task("losses", total=sum(run.steps for run in runs))
    if runs:
        for message in run_ranks(train, world_size, runs):
            if "loss" in message:
                row = pd.DataFrame([message])
                row.to_csv(path, mode="a", header=not path.exists(), index=False)
            else:
                progress.update(bar, advance=message["steps"])
    return pd.read_csv(path)


_KEYS = ["plan", "codec", "every", "seed", "steps"]


def gaps(losses: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yields for each plan its loss over that of the base with the same seed, with an interval."""
    base = losses[(losses.plan == BASE.plan) & (losses.codec == BASE.codec)].set_index("seed").loss
    for (plan, codec, every), rows in losses.groupby(["plan", "codec", "every"], sort=False):
        pairs = rows.set_index("seed").loss - base
        mean, half = interval(pairs.dropna().tolist())
        yield {
            "plan": plan,
            "codec": codec,
            "every": every,
            "loss": rows.loss.mean(),
            "gap": mean,
            "gap_half_width": half,
            "seeds": len(rows),
        }
