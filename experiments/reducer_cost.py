"""Compares step time and memory of ``ddp_core``'s DistributedDataParallel with torch's, on links.

Run ``python -m experiments.reducer_cost``. Two hosts (network namespaces) joined by a cable,
unlimited and at 1 Gbit/s, train three models with torch's class, with ours, and with ours in
torch's buckets, in alternating blocks of steps; the order is reversed in every second turn.
``ratio`` is a step time over torch's in the same turn, with its quartiles over the turns. Memory is
the peak of a process that trained one case alone, over torch's. Needs what
``experiments/namespaces.py`` needs.
"""

from __future__ import annotations

import json
import resource
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_core
from experiments.hosts import joined, run_on_hosts
from experiments.models import MODELS
from experiments.namespaces import reason_not_to_run

RATES: dict[str, str | None] = {"unlimited": None, "1 Gbit/s": "1gbit"}
CASES: dict[str, tuple[type[DistributedDataParallel], dict[str, Any]]] = {
    "torch": (DistributedDataParallel, {}),
    "ours": (ddp_core.DistributedDataParallel, {}),
    "ours, torch's buckets": (ddp_core.DistributedDataParallel, {"bucket_cap_mb_list": [1, 25]}),
    "torch, views": (DistributedDataParallel, {"gradient_as_bucket_view": True}),
    "ours, views": (ddp_core.DistributedDataParallel, {"gradient_as_bucket_view": True}),
}
MODULE = "experiments.reducer_cost"


def _steps(model: nn.Module, x: torch.Tensor, count: int) -> float:
    """Returns the seconds per step of the slower rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
    seconds = torch.tensor((time.perf_counter() - begin) / count)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _run_rank(model: str, cases: list[str], rounds: int, block: int) -> None:
    """Trains blocks of steps of every case in turn; rank 0 prints step times and peak memory."""
    with joined() as rank:
        runners = {}
        for case in cases:
            cls, options = CASES[case]
            torch.manual_seed(0)
            runners[case] = cls(MODELS[model].build(), **options)
        torch.manual_seed(rank)
        x = MODELS[model].make_input(MODELS[model].batch)
        for ddp in runners.values():
            _steps(ddp, x, 4)  # buckets are rebuilt after the first step
        turns = []
        for turn in range(rounds):
            # The order is reversed, so that no case always runs behind the same one.
            order = list(runners.items())[:: 1 if turn % 2 == 0 else -1]
            turns.append({case: _steps(ddp, x, block) for case, ddp in order})
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
        if rank == 0:
            print(json.dumps({"turns": turns, "peak_mib": peak}), flush=True)


def _draw(pictures: str) -> None:
    """Trains the transformer, eager and compiled, and draws a timeline of one step of each."""
    with joined() as rank:
        for name in ("eager", "compiled"):
            torch.manual_seed(0)
            ddp = ddp_core.DistributedDataParallel(MODELS["transformer"].build())
            ddp.timeline.every = 1
            model = torch.compile(ddp, backend="aot_eager") if name == "compiled" else ddp
            torch.manual_seed(rank)
            _steps(model, MODELS["transformer"].make_input(3), 12)
            if rank == 0:
                ddp.timeline.plot(Path(pictures, f"timeline_{name}.png"))


def _ratios(turns: list[dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        # Views save a copy of the gradients in torch's class, too: like is compared with like.
        base = "torch, views" if case.endswith("views") else "torch"
        if case == base:
            continue
        low, middle, high = statistics.quantiles([t[case] / t[base] for t in turns], n=4)
        rows.append({"case": case, "ratio": middle, "q1": low, "q3": high, "turns": len(turns)})
    return rows


def _memory(model: str) -> dict[str, float]:
    """Returns the peak MiB of each case; medians of three runs."""
    # Each case in a process of its own: a peak never falls, and would be that of all cases before.
    return {
        case: statistics.median(
            run_on_hosts(MODULE, {"model": model, "cases": [case], "rounds": 1, "block": 4})[0][
                "peak_mib"
            ]
            for _ in range(3)
        )
        for case in CASES
    }


def main(
    rounds: Annotated[int, typer.Option(help="Alternating turns.", min=5)] = 9,
    block: Annotated[int, typer.Option(help="Steps of a block.", min=1)] = 4,
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path(
        "results/reducer_cost.csv"
    ),
) -> None:
    """Prints the ratios; below 1 ours is faster, or smaller."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs what removes the namespaces
    reason = reason_not_to_run()
    if reason is not None:
        sys.exit(f"{MODULE}: {reason}")
    console, rows = Console(), []
    with Progress(console=console) as progress:
        bar = progress.add_task("measuring", total=len(MODELS) * (len(RATES) + 1))
        for model in MODELS:
            progress.update(bar, description=f"{model}, memory")
            memory = _memory(model)
            progress.advance(bar)
            for link, rate in RATES.items():
                progress.update(bar, description=f"{model}, {link}")
                task = {"model": model, "cases": list(CASES), "rounds": rounds, "block": block}
                (report,) = run_on_hosts(MODULE, task, rate=rate, timeout=600)
                for row in _ratios(report["turns"]):
                    base = "torch, views" if row["case"].endswith("views") else "torch"
                    row["memory_ratio"] = memory[row["case"]] / memory[base]
                    rows.append({"model": model, "link": link, **row})
                    progress.console.print(
                        f"{model}, {link}, {row['case']}: {row['ratio']:.3f} "
                        f"({row['q1']:.3f} to {row['q3']:.3f}), memory {row['memory_ratio']:.3f}"
                    )
                progress.advance(bar)
    out.parent.mkdir(parents=True, exist_ok=True)
    run_on_hosts(MODULE, {"pictures": str(out.parent.resolve())}, rate="1gbit")
    table = pd.DataFrame(rows)
    console.print(table.to_string(index=False, float_format="{:.3f}".format))
    table.to_csv(out, index=False)
    console.print(f"wrote {out}, and next to it two pictures of one step")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        task = json.loads(sys.argv[2])
        _draw(**task) if "pictures" in task else _run_rank(**task)
    else:
        typer.run(main)
