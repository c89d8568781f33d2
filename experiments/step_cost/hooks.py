"""Compares the step time of the hooks of this package with torch's, in alternating runs.

Run ``python -m experiments.step_cost hooks``. Three models with a batch of one and gradients that
are views of the buckets, so that hooks are as large a part of a step as possible: a ResNet-18 for
32x32 images (11 M parameters), a transformer on 96 tokens (13 M), 500 tiny layers (2 M). A turn is
a block of steps with torch's hook, one with ours and one with no-op.

``step_ratio`` is the step time with our hook over that with torch's in the same turn, with its
quartiles over the turns. ``torch`` and ``ours`` are step times over that of no-op; ``cost_ratio``
is the time that our hook adds to no-op over the time that torch's adds. PowerSGD is compared in one
bucket and from step 2 on, where torch's hook runs on Gloo.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.tools.models import MODELS
from experiments.tools.processes import Send, run_ranks
from experiments.tools.tables import printed
from experiments.tools.turns import (
    in_turns,
    quartiles,
    seconds_per_step,
    train_step,
)

Pair = tuple[str, float, Callable[[Any], Any], Callable[[Any], Any]]


def _torch_powersgd(ddp: DistributedDataParallel) -> None:
    state = torch_powersgd.PowerSGDState(None, 4, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, torch_powersgd.powerSGD_hook)


def _noop(ddp: DistributedDataParallel) -> commhooks.HookState:
    return commhooks.register(ddp, "noop")


# Name, bucket size in MB, registration of torch's hook, registration of ours. One bucket for
# PowerSGD: torch's hook starts collectives in callbacks, whose order several buckets would make
# different on different ranks.
PAIRS: list[Pair] = [
    (
        "allreduce",
        25,
        lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda ddp: commhooks.register(ddp, "none"),
    ),
    (
        "fp16",
        25,
        lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        lambda ddp: commhooks.register(ddp, "fp16"),
    ),
    (
        "PowerSGD 4, one bucket",
        4096,
        _torch_powersgd,
        lambda ddp: commhooks.register(ddp, "powersgd", rank=4, start_step=2),
    ),
]


def compare(rank: int, world_size: int, send: Send, model: str, rounds: int, block: int) -> None:
    """Runs blocks of steps with torch's hook, ours and no-op in turns, for every pair."""
    make_model, make_input, _ = MODELS[model]
    for name, cap, torchs, ours in PAIRS:
        runners: dict[str, tuple[DistributedDataParallel, Any]] = {}
        for kind, attach in (("torch", torchs), ("ours", ours), ("noop", _noop)):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(
                make_model(), bucket_cap_mb=cap, gradient_as_bucket_view=True
            )
            runners[kind] = (ddp, attach(ddp))
        torch.manual_seed(rank)
        x = make_input(1)
        steps = {kind: partial(train_step, ddp, x) for kind, (ddp, _) in runners.items()}
        # The first step rebuilds the buckets, the second is the last dense one of PowerSGD.
        for step in steps.values():
            seconds_per_step(step, 4)
        blocks = {kind: partial(seconds_per_step, step, block) for kind, step in steps.items()}
        turns = in_turns(blocks, rounds)
        if rank == 0:
            send({"model": model, "hook": name, **_ratios(turns)})
        for _, hook in runners.values():
            if hook is not None:
                hook.close()


def _ratios(turns: list[dict[str, float]]) -> dict[str, float]:
    """Returns medians over the turns, and quartiles of the step ratio."""

    def over(upper: str, lower: str) -> list[float]:
        return [turn[upper] / turn[lower] for turn in turns]

    added = [(turn["ours"] - turn["noop"]) / (turn["torch"] - turn["noop"]) for turn in turns]
    low, middle, high = quartiles(over("ours", "torch"))
    return {
        "step_ratio": middle,
        "q1": low,
        "q3": high,
        "torch": statistics.median(over("torch", "noop")),
        "ours": statistics.median(over("ours", "noop")),
        "cost_ratio": statistics.median(added),
        "turns": len(turns),
    }


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}.")] = None,
    rounds: Annotated[int, typer.Option(help="Alternating turns.", min=5)] = 15,
    block: Annotated[int, typer.Option(help="Steps of a block.", min=1)] = 8,
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path(
        "results/step_cost/hooks.csv"
    ),
) -> None:
    """Prints the ratios; below 1 ours is faster."""
    rows = []
    names = model or list(MODELS)
    for name in names:
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(MODELS)}")
    with Progress() as progress:
        bar = progress.add_task("measuring", total=len(names) * len(PAIRS))
        for name in names:
            for row in run_ranks(compare, 2, name, rounds, block):
                rows.append(row)
                progress.console.print(
                    f"{row['model']}, {row['hook']}: {row['step_ratio']:.3f} "
                    f"({row['q1']:.3f} to {row['q3']:.3f})"
                )
                progress.update(bar, advance=1, description=f"{name}: {row['hook']}")
    printed(rows, out)
