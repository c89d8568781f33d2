"""``python -m experiments.scheme_cost``: step time with every scheme, on lines of set rate.

Two hosts (network namespaces) on one switch train a model in alternating blocks of steps, one per
scheme; the order turns around every time. ``over no-op`` is a scheme's step time over that of the
no-op hook in the same turn, which exchanges nothing: 1 is what a free exchange would give, and the
share above it is what waits for the network or computes codes. Medians with quartiles over the
turns. Needs root, ``ip`` and ``tc`` (Debian: iproute2).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.progress import track
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.hosts import joined, reason_not_to_run, run_on_hosts
from experiments.models import MODELS

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "no-op": ("noop", {}),
    "none": ("none", {}),
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "int4": ("int4", {}),
    "onebit": ("onebit", {}),
    "powersgd 4": ("powersgd", {"rank": 4}),
    "acpsgd 4": ("acpsgd", {"rank": 4}),
    "topk 1 %": ("topk", {"ratio": 0.01}),
    "random_k 10 %": ("random_k", {"ratio": 0.1}),
}


def _steps(model: nn.Module, x: torch.Tensor, count: int) -> float:
    """Seconds a step of the slower rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        model.zero_grad()
        model(x).float().square().mean().backward()
    seconds = torch.tensor((time.perf_counter() - begin) / count)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _run_rank(model: str, rounds: int, block: int) -> None:
    with joined() as rank:
        runners = {}
        for name, (scheme, options) in SCHEMES.items():
            torch.manual_seed(0)
            ddp = DistributedDataParallel(MODELS[model].build(), gradient_as_bucket_view=True)
            runners[name] = (ddp, commhooks.register(ddp, scheme, **options))
        torch.manual_seed(rank)
        x = MODELS[model].make_input(MODELS[model].batch)
        for ddp, _ in runners.values():
            _steps(ddp, x, 3)
        for turn in range(rounds):
            names = list(runners) if turn % 2 == 0 else list(reversed(runners))
            times = {name: _steps(runners[name][0], x, block) for name in names}
            if rank == 0:
                print(json.dumps({"times": times}), flush=True)
        for _, hook in runners.values():
            hook.close()


def _row(model: str, rate: str, name: str, times: list[dict[str, float]]) -> dict[str, Any]:
    ratios = sorted(turn[name] / turn["no-op"] for turn in times)
    q1, middle, q3 = statistics.quantiles(ratios, n=4)
    return {"rate": rate, "model": model, "scheme": name, "over no-op": middle, "q1": q1, "q3": q3}


def main(
    rounds: Annotated[int, typer.Option(help="Turns.", min=5)] = 7,
    block: Annotated[int, typer.Option(help="Steps a turn and scheme.", min=1)] = 4,
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "resnet,transformer",
    rates: Annotated[str, typer.Option(help="As tc takes them, comma-separated.")] = (
        "200mbit,1gbit,10gbit"
    ),
    out: Annotated[Path, typer.Option(help="The table is written there.")] = Path(
        "results/scheme_cost.csv"
    ),
) -> None:
    """Prints the table."""
    if reason := reason_not_to_run():
        sys.exit(f"experiments.scheme_cost: {reason}")
    rows = []
    for rate in track(rates.split(","), "rates"):
        for model in models.split(","):
            if model not in MODELS:
                raise typer.BadParameter(f"{model!r} is not one of {', '.join(MODELS)}")
            task = {"model": model, "rounds": rounds, "block": block}
            found = run_on_hosts("experiments.scheme_cost", task, rate=rate, timeout=900)
            times = [one["times"] for one in found]
            rows += [_row(model, rate, name, times) for name in SCHEMES]
    table = pd.DataFrame(rows)
    wide = table.pivot(index="scheme", columns=["rate", "model"], values="over no-op")
    typer.echo(wide.reindex(list(SCHEMES)).to_string(float_format="{:.2f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        _run_rank(**json.loads(sys.argv[2]))
    else:
        typer.run(main)
