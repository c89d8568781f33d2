"""Measures what ``register(verify=...)`` adds to the step time, in alternating runs.

Run ``python -m experiments.verify_cost``. Two Gloo ranks train a small convolutional network and
200 tiny layers. Two hooks of one scheme take turns on two copies of the model, one with
verification and one without; the order is reversed in every second turn.

Two runs of 100 steps of the same code differ by more than one verified step adds. So blocks have 8
steps, with ``verify=8``: ``verified_ms`` is what a verified step adds, the median difference
of the two blocks of a turn, with quartiles, which includes the messages under the plain steps
behind it. ``added`` is ``verified_ms / (100 plain_ms)``, the share at ``verify=100``.

``--rates 0,1000,200`` adds lines of 1 Gbit/s and 200 Mbit/s between two hosts, which need what
``experiments/namespaces.py`` needs; 0 is the loopback device.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.hosts import joined, messages_from_hosts
from experiments.models import Model
from experiments.namespaces import reason_not_to_run
from experiments.processes import run_ranks
from experiments.tasks import TinyLayers

TABLE_WIDTH = 140
EVERY = 100  # of which the share is told
BLOCK = 8  # steps, of which one is verified
SCHEMES: dict[str, dict[str, Any]] = {"int8": {}, "powersgd": {"rank": 4}}


def _small_cnn() -> nn.Module:
    """Returns three convolutions for 16x16 images: 0.1 M parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)),
    )


MODELS = {
    "small CNN": Model(_small_cnn, lambda batch: torch.randn(batch, 3, 16, 16), 16),
    "200 tiny layers": Model(lambda: TinyLayers(200, 32), lambda batch: torch.randn(batch, 32), 32),
}


def compare(
    rank: int, world_size: int, send: Callable[[Any], None], model: str, turns: int
) -> None:
    """Runs blocks of steps with and without verification in turn, for every scheme, in a rank."""
    for scheme in SCHEMES:
        plain, added = _turns(model, scheme, turns)
        row: dict[str, Any] = {"model": model, "scheme": scheme}
        row["plain_ms"] = 1e3 * statistics.median(plain)
        low, middle, high = (1e3 * BLOCK * one for one in statistics.quantiles(added, n=4))
        row |= {"verified_ms": middle, "verified_q1": low, "verified_q3": high}
        row["added"] = middle / (EVERY * row["plain_ms"])
        if rank == 0:
            send(row | {"turns": turns})


def run_rank(task: dict[str, Any]) -> None:
    """Compares in the process of a host; prints an object for each scheme."""
    with joined() as rank:
        compare(rank, 2, lambda row: print(json.dumps(row), flush=True), **task)


def _rows(model: str, mbit: float, turns: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a model on a line; 0 Mbit/s: the loopback device."""
    if mbit:
        task = {"model": model, "turns": turns}
        messages = messages_from_hosts(
            "experiments.verify_cost", task, rate=f"{mbit:g}mbit", timeout=900
        )
        found: Iterator[dict[str, Any]] = (message.content for message in messages)
    else:
        found = run_ranks(compare, 2, model, turns, own_cores=True)
    for row in found:
        yield {"mbit": mbit} | row


def _turns(model: str, scheme: str, turns: int) -> tuple[list[float], list[float]]:
    """Returns per turn the seconds of a plain step, and what one in ``BLOCK`` adds on average."""
    build, make_input, batch = MODELS[model]
    runners: dict[str, tuple[DistributedDataParallel, commhooks.HookState]] = {}
    verified: dict[str, Any] = {"verify": BLOCK}
    for kind, arguments in (("plain", {}), ("verified", verified)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(build(), gradient_as_bucket_view=True)
        hook = commhooks.register(ddp, scheme, **arguments, **SCHEMES[scheme])
        runners[kind] = (ddp, hook)
    torch.manual_seed(dist.get_rank())
    x = make_input(batch)
    for ddp, _ in runners.values():
        # Also a first verification. Later ones are in the middle of a block.
        _seconds(ddp, x, BLOCK // 2)
    found: dict[str, list[float]] = {"plain": [], "verified": []}
    for turn in range(turns):
        # The order is reversed, so that no hook always runs behind the same one.
        for kind, (ddp, _) in list(runners.items())[:: 1 if turn % 2 == 0 else -1]:
            found[kind].append(_seconds(ddp, x, BLOCK) / BLOCK)
    verification = runners["verified"][1].verification
    assert verification is not None
    verification.report()
    assert verification.steps == 1 + turns, "one verified step in each block"
    for _, hook in runners.values():
        hook.close()
    pairs = zip(found["verified"], found["plain"], strict=True)
    return found["plain"], [verified - plain for verified, plain in pairs]


def _seconds(ddp: DistributedDataParallel, x: Tensor, count: int) -> float:
    """Returns the seconds of ``count`` steps, on the slowest rank."""
    parameters = list(ddp.parameters())
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = None
        ddp(x).square().mean().backward()
        with torch.no_grad():
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-1e-4)
    seconds = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def main(
    turns: Annotated[int, typer.Option(help=f"Turns of blocks of {BLOCK} steps.", min=5)] = 81,
    rates: Annotated[str, typer.Option(help="Mbit/s; 0: the loopback device.")] = "0",
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path(
        "results/verify_cost/verify_cost.csv"
    ),
) -> None:
    """Prints what verification adds; 0.01 is a percent of the step time."""
    lines = [float(rate) for rate in rates.split(",")]
    if any(lines) and (reason := reason_not_to_run()):
        sys.exit(f"experiments.verify_cost --rates {rates}: {reason}")
    console, rows = Console(), []
    if console.width < TABLE_WIDTH:  # rich wraps lines at 80 columns if the output is a pipe
        console = Console(width=TABLE_WIDTH)
    with Progress(console=console) as progress:
        cases = len(lines) * len(MODELS) * len(SCHEMES)
        bar = progress.add_task("measuring", total=cases)
        for mbit in lines:
            where = f"{mbit:g} Mbit/s" if mbit else "loopback"
            for row in (row for model in MODELS for row in _rows(model, mbit, turns)):
                rows.append(row)
                progress.console.print(
                    f"{where}, {row['model']}, {row['scheme']}: a verified step "
                    f"adds {row['verified_ms']:.1f} ms ({row['verified_q1']:.1f} to "
                    f"{row['verified_q3']:.1f}) to {row['plain_ms']:.1f} ms, "
                    f"{100 * row['added']:.2f} % at verify={EVERY}"
                )
                progress.update(bar, advance=1, description=f"{row['model']}: {row['scheme']}")
    table = pd.DataFrame(rows)
    console.print(table.to_string(index=False, float_format="{:.4f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(out, index=False)
    console.print(f"wrote {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_rank(json.loads(sys.argv[2]))
    else:
        typer.run(main)
