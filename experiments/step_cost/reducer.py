"""Compares step time and memory of ``ddp_core``'s DistributedDataParallel with torch's, on links.

Run ``python -m experiments.step_cost reducer``. Two hosts (network namespaces) joined by a cable,
unlimited and at 1 Gbit/s, train three models with torch's class, with ours, and with ours in
torch's buckets, in alternating blocks of steps; the order is reversed in every second turn.
``ratio`` is a step time over torch's in the same turn, with its quartiles over the turns. Memory is
the peak of a process that trained one case alone, over torch's. Needs what
``experiments/tools/namespaces.py`` needs.
"""

from __future__ import annotations

import resource
import signal
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddp_core
from experiments.tools.hosts import run_on_hosts
from experiments.tools.models import MODELS
from experiments.tools.namespaces import reason_not_to_run
from experiments.tools.processes import Send
from experiments.tools.tables import printed
from experiments.tools.turns import in_turns, quartiles, seconds_per_step

RATES: dict[str, str | None] = {"unlimited": None, "1 Gbit/s": "1gbit"}
CASES: dict[str, tuple[type[DistributedDataParallel], dict[str, Any]]] = {
    "torch": (DistributedDataParallel, {}),
    "ours": (ddp_core.DistributedDataParallel, {}),
    "ours, torch's buckets": (ddp_core.DistributedDataParallel, {"bucket_cap_mb_list": [1, 25]}),
    "torch, views": (DistributedDataParallel, {"gradient_as_bucket_view": True}),
    "ours, views": (ddp_core.DistributedDataParallel, {"gradient_as_bucket_view": True}),
}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def _stepped(model: nn.Module, x: Tensor) -> Callable[[], None]:
    return partial(_step, model, torch.optim.SGD(model.parameters(), lr=1e-4), x)


def compare(
    rank: int,
    world_size: int,
    send: Send,
    *,
    model: str,
    cases: list[str],
    rounds: int,
    block: int,
) -> None:
    """Trains blocks of steps of every case in turns; rank 0 sends step times and peak memory."""
    models = {}
    for case in cases:
        cls, options = CASES[case]
        torch.manual_seed(0)
        models[case] = cls(MODELS[model].build(), **options)
    torch.manual_seed(rank)
    x = MODELS[model].make_input(MODELS[model].batch)
    steps = {case: _stepped(ddp, x) for case, ddp in models.items()}
    for step in steps.values():
        seconds_per_step(step, 4)  # buckets are rebuilt after the first step
    blocks = {case: partial(seconds_per_step, step, block) for case, step in steps.items()}
    turns = in_turns(blocks, rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    if rank == 0:
        send({"turns": turns, "peak_mib": peak})


def draw(rank: int, world_size: int, send: Send, *, folder: str) -> None:
    """Trains the transformer, eager and compiled, and draws a timeline of one step of each."""
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        ddp = ddp_core.DistributedDataParallel(MODELS["transformer"].build())
        ddp.timeline.every = 1
        model = torch.compile(ddp, backend="aot_eager") if name == "compiled" else ddp
        torch.manual_seed(rank)
        seconds_per_step(_stepped(model, MODELS["transformer"].make_input(3)), 12)
        if rank == 0:
            ddp.timeline.plot(Path(folder, f"timeline_{name}.png"))


def _ratios(turns: list[dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        # Views save a copy of the gradients in torch's class, too: like is compared with like.
        base = "torch, views" if case.endswith("views") else "torch"
        if case == base:
            continue
        low, middle, high = quartiles([turn[case] / turn[base] for turn in turns])
        rows.append({"case": case, "ratio": middle, "q1": low, "q3": high, "turns": len(turns)})
    return rows


def _memory(model: str) -> dict[str, float]:
    """Returns the peak MiB of each case; medians of three runs."""
    # Each case in a process of its own: a peak never falls, and would be that of all cases before.
    return {
        case: statistics.median(
            run_on_hosts(compare, {"model": model, "cases": [case], "rounds": 1, "block": 4})[0][
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
        "results/step_cost/reducer.csv"
    ),
) -> None:
    """Prints the ratios; below 1 ours is faster, or smaller."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs what removes the namespaces
    reason = reason_not_to_run()
    if reason is not None:
        sys.exit(f"experiments.step_cost reducer: {reason}")
    rows = []
    with Progress() as progress:
        bar = progress.add_task("measuring", total=len(MODELS) * (len(RATES) + 1))
        for model in MODELS:
            progress.update(bar, description=f"{model}, memory")
            memory = _memory(model)
            progress.advance(bar)
            for link, rate in RATES.items():
                progress.update(bar, description=f"{model}, {link}")
                task = {"model": model, "cases": list(CASES), "rounds": rounds, "block": block}
                (report,) = run_on_hosts(compare, task, rate=rate, timeout=600)
                for row in _ratios(report["turns"]):
                    base = "torch, views" if row["case"].endswith("views") else "torch"
                    row["memory_ratio"] = memory[row["case"]] / memory[base]
                    rows.append({"model": model, "link": link, **row})
                    progress.console.print(
                        f"{model}, {link}, {row['case']}: {row['ratio']:.3f} "
                        f"({row['q1']:.3f} to {row['q3']:.3f}), memory {row['memory_ratio']:.3f}"
                    )
                progress.advance(bar)
    printed(rows, out)
    run_on_hosts(draw, {"folder": str(out.parent.resolve())}, rate="1gbit")
    print("and two pictures of one step beside it")
