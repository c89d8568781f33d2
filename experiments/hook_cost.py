"""Compares the step time of the hooks of this package with torch's, in alternating runs.

Run ``python -m experiments.hook_cost``. Three models with a batch of one and gradients that are
views of the buckets, so that hooks are as large a part of a step as possible: a ResNet-18 for 32x32
images (11 M parameters), a transformer on 96 tokens (13 M), 500 tiny layers (2 M). A turn is a
block of steps with torch's hook, one with ours and one with no-op; the order is reversed in every
second turn.

``step_ratio`` is the step time with our hook over that with torch's in the same turn, with its
quartiles over the turns. ``torch`` and ``ours`` are step times over that of no-op; ``cost_ratio``
is the time that our hook adds to no-op over the time that torch's adds. PowerSGD is compared in one
bucket and from step 2 on, where torch's hook runs on Gloo.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.models import MODELS
from experiments.processes import run_ranks

TABLE_WIDTH = 110
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


def compare(
    rank: int,
    world_size: int,
    send: Callable[[Any], None],
    model: str,
    rounds: int,
    block: int,
) -> None:
    """Runs blocks of steps with torch's hook, ours and no-op in turn, for every pair, in a rank."""
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
        # The first step rebuilds the buckets, the second is the last dense one of PowerSGD.
        for ddp, _ in runners.values():
            _steps(ddp, x, 4)
        turns = []
        for turn in range(rounds):
            # The order is reversed, so that no hook always runs behind the same one.
            order = list(runners.items())[:: 1 if turn % 2 == 0 else -1]
            seconds = {kind: _steps(ddp, x, block) for kind, (ddp, _) in order}
            turns.append(seconds)
        if rank == 0:
            send({"model": model, "hook": name, **_ratios(turns)})
        for _, hook in runners.values():
            if hook is not None:
                hook.close()


def _ratios(turns: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Returns medians over the turns, and quartiles of the step ratio."""

    def over(upper: str, lower: str, part: int) -> list[float]:
        return [turn[upper][part] / turn[lower][part] for turn in turns]

    added = [
        (turn["ours"][0] - turn["noop"][0]) / (turn["torch"][0] - turn["noop"][0]) for turn in turns
    ]
    low, middle, high = statistics.quantiles(over("ours", "torch", 0), n=4)
    return {
        "step_ratio": middle,
        "q1": low,
        "q3": high,
        "backward_ratio": statistics.median(over("ours", "torch", 1)),
        "torch": statistics.median(over("torch", "noop", 0)),
        "ours": statistics.median(over("ours", "noop", 0)),
        "cost_ratio": statistics.median(added),
        "turns": len(turns),
    }


def _steps(ddp: DistributedDataParallel, x: Tensor, count: int) -> tuple[float, float]:
    """Returns the seconds of ``count`` steps and of their backward passes, on the slowest rank."""
    parameters = list(ddp.parameters())
    dist.barrier()
    begin, backward = time.perf_counter(), 0.0
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = None
        loss = ddp(x).float().square().mean()
        middle = time.perf_counter()
        loss.backward()
        backward += time.perf_counter() - middle
        # Not an optimizer: its time would be the same in all runs, and hide a part of the ratio.
        with torch.no_grad():
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-1e-4)
    seconds = torch.tensor([time.perf_counter() - begin, backward])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds[0]), float(seconds[1])


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}.")] = None,
    rounds: Annotated[int, typer.Option(help="Alternating turns.", min=5)] = 15,
    block: Annotated[int, typer.Option(help="Steps of a block.", min=1)] = 8,
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path(
        "results/hook_cost.csv"
    ),
) -> None:
    """Prints the ratios; below 1 ours is faster."""
    console, rows = Console(), []
    if console.width < TABLE_WIDTH:  # rich wraps lines at 80 columns if the output is a pipe
        console = Console(width=TABLE_WIDTH)
    names = model or list(MODELS)
    for name in names:
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(MODELS)}")
    with Progress(console=console) as progress:
        bar = progress.add_task("measuring", total=len(names) * len(PAIRS))
        for name in names:
            for row in run_ranks(compare, 2, name, rounds, block):
                rows.append(row)
                progress.console.print(
                    f"{row['model']}, {row['hook']}: {row['step_ratio']:.3f} "
                    f"({row['q1']:.3f} to {row['q3']:.3f})"
                )
                progress.update(bar, advance=1, description=f"{name}: {row['hook']}")
    table = pd.DataFrame(rows)
    console.print(table.to_string(index=False, float_format="{:.3f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
