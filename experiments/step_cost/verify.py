"""Measures what ``register(verify=...)`` adds to the step time, in alternating runs.

Run ``python -m experiments.step_cost verify``. Two Gloo ranks train a small convolutional network
and 200 tiny layers. Two hooks of one scheme take turns on two copies of the model, one with
verification and one without.

Two runs of 100 steps of the same code differ by more than one verified step adds. So blocks have 8
steps, with ``verify=8``: ``verified_ms`` is what a verified step adds, the median difference
of the two blocks of a turn, with quartiles, which includes the messages under the plain steps
behind it. ``added`` is ``verified_ms / (100 plain_ms)``, the share at ``verify=100``.

``--rates 0,1000,200`` adds lines of 1 Gbit/s and 200 Mbit/s between two hosts, which need what
``experiments/tools/namespaces.py`` needs; 0 is the loopback device.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.tools.hosts import messages_from_hosts
from experiments.tools.models import Model
from experiments.tools.namespaces import reason_not_to_run
from experiments.tools.processes import Send, run_ranks
from experiments.tools.tables import printed
from experiments.tools.tasks import TinyLayers
from experiments.tools.turns import (
    in_turns,
    quartiles,
    seconds_per_step,
    train_step,
)

EVERY = 100  # for which the share is given
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


def compare(rank: int, world_size: int, send: Send, model: str, turns: int) -> None:
    """Runs blocks of steps with and without verification in turns, for every scheme, in a rank."""
    for scheme in SCHEMES:
        plain, added = _turns(rank, model, scheme, turns)
        row: dict[str, Any] = {"model": model, "scheme": scheme}
        row["plain_ms"] = 1e3 * statistics.median(plain)
        low, middle, high = (1e3 * BLOCK * seconds for seconds in quartiles(added))
        row |= {"verified_ms": middle, "verified_q1": low, "verified_q3": high}
        row["added"] = middle / (EVERY * row["plain_ms"])
        if rank == 0:
            send(row | {"turns": turns})


def _rows(model: str, mbit: float, turns: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a model on a line; 0 Mbit/s: the loopback device."""
    if mbit:
        task = {"model": model, "turns": turns}
        messages = messages_from_hosts(compare, task, rate=f"{mbit:g}mbit", timeout=900)
        rows: Iterator[dict[str, Any]] = (message.content for message in messages)
    else:
        rows = run_ranks(compare, 2, model, turns, own_cores=True)
    for row in rows:
        yield {"mbit": mbit} | row


def _turns(rank: int, model: str, scheme: str, turns: int) -> tuple[list[float], list[float]]:
    """Returns per turn the seconds of a plain step, and what one in ``BLOCK`` adds on average."""
    build, make_input, batch = MODELS[model]
    models, hooks = {}, {}
    for kind, arguments in (("plain", {}), ("verified", {"verify": BLOCK})):
        torch.manual_seed(0)
        models[kind] = DistributedDataParallel(build(), gradient_as_bucket_view=True)
        hooks[kind] = commhooks.register(models[kind], scheme, **arguments, **SCHEMES[scheme])
    torch.manual_seed(rank)
    x = make_input(batch)
    steps = {kind: partial(train_step, ddp, x) for kind, ddp in models.items()}
    for step in steps.values():
        # Also a first verification. Later ones are in the middle of a block.
        seconds_per_step(step, BLOCK // 2)
    times = in_turns(
        {kind: partial(seconds_per_step, step, BLOCK) for kind, step in steps.items()}, turns
    )
    verification = hooks["verified"].verification
    assert verification is not None
    verification.report()
    assert verification.steps == 1 + turns, "one verified step in each block"
    for hook in hooks.values():
        hook.close()
    return [turn["plain"] for turn in times], [turn["verified"] - turn["plain"] for turn in times]


def main(
    turns: Annotated[int, typer.Option(help=f"Turns of blocks of {BLOCK} steps.", min=5)] = 81,
    rates: Annotated[str, typer.Option(help="Mbit/s; 0: the loopback device.")] = "0",
    out: Annotated[Path, typer.Option(help="Where the table goes.")] = Path(
        "results/step_cost/verify.csv"
    ),
) -> None:
    """Prints what verification adds; 0.01 is a percent of the step time."""
    lines = [float(rate) for rate in rates.split(",")]
    if any(lines) and (reason := reason_not_to_run()):
        sys.exit(f"experiments.step_cost verify --rates {rates}: {reason}")
    rows = []
    with Progress() as progress:
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
    printed(rows, out, digits=4)
