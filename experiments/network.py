"""Trains over limited links and compares the step times with those that were predicted.

Run ``python -m experiments.network``. Hosts (network namespaces) on one switch, each with a cable
of given rate, train models with one hook after the other, in turns. ``predicted`` is what
:mod:`commhooks.predict` says from the step without communication (the hook "noop"), the time of a
scheme's computations, and from the links, all of which are measured on the same ranks: nothing is
fitted to the measured steps. Needs what ``experiments/namespaces.py`` needs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import commhooks
from commhooks.predict import Recorder, ThisDevice, Workload, predict_step
from commhooks.predict.link import measure_link
from ddp_core import DistributedDataParallel
from experiments.hosts import joined, messages_from_hosts
from experiments.models import MODELS
from experiments.namespaces import reason_not_to_run

SCHEMES = ("none", "bf16", "int8", "int4", "powersgd:rank=2", "topk", "eden")
CAP_MB = 8.0  # ddp_core's default on the CPU


@dataclass(frozen=True)
class Settings:
    """Describes what a rank runs.

    Attributes:
        model: of ``experiments.models``.
        schemes: names with options, as "powersgd:rank=2".
        rate: bits per second of the link. None: unlimited.
        delay_s: seconds that a message is on its way, one way.
        turns: turns of all schemes.
        seconds: of training per turn and scheme, at least one step.
    """

    model: str
    schemes: tuple[str, ...]
    rate: float | None
    delay_s: float = 0.0
    turns: int = 7
    seconds: float = 0.5


def made(text: str) -> commhooks.Scheme:
    """Returns a scheme from a name with options, as "powersgd:rank=2"."""
    name, _, options = text.partition(":")
    pairs = (option.split("=") for option in options.split(",") if option)
    return commhooks.make(name, **{key: json.loads(value) for key, value in pairs})


class _Run:
    """Trains a copy of the model with one hook."""

    def __init__(self, settings: Settings, scheme: str) -> None:
        torch.manual_seed(0)
        model = MODELS[settings.model]
        self.ddp = DistributedDataParallel(model.build())
        self.input = model.make_input(model.batch)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-4)
        self.hook = commhooks.register(self.ddp, made(scheme))
        self.times: list[float] = []
        self.steps = 1

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(self.input).float().square().mean().backward()
        self.optimizer.step()

    def turn(self, *, timed: bool = True) -> None:
        """Runs the steps of a turn; notes the seconds per step of the slowest rank."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        took = torch.tensor((time.perf_counter() - begin) / self.steps, dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if timed:
            self.times.append(float(took))


def run_rank(settings: Settings) -> None:
    """Trains in the process of a rank; rank 0 prints an object for each scheme."""
    with joined() as rank:
        runs = {scheme: _Run(settings, scheme) for scheme in ("noop", *settings.schemes)}
        for run in runs.values():
            for _ in range(3):  # dense steps, rebuilt buckets
                run.turn(timed=False)
            begin = time.perf_counter()
            run.turn(timed=False)
            steps = torch.tensor(settings.seconds / (time.perf_counter() - begin))
            dist.all_reduce(steps, op=dist.ReduceOp.MIN)
            run.steps = max(1, int(steps))
        workload = _recorded(runs["noop"], steps=15)
        predicted = _predicted(settings, workload)
        order = list(runs)
        for turn in range(settings.turns):
            for scheme in order if turn % 2 == 0 else order[::-1]:
                runs[scheme].turn()
        if rank == 0:
            for scheme, run in runs.items():
                row = {"scheme": scheme, "times": run.times, **predicted[scheme]}
                print(json.dumps(row), flush=True)


def _recorded(run: _Run, *, steps: int) -> Workload:
    recorder = Recorder(run.ddp.module)
    for step in range(steps + 1):
        begin = time.perf_counter()
        dist.barrier()  # as in training, where ranks wait for each other in every step
        recorder.step_begins(time.perf_counter() - begin)
        if step < steps:
            run.step()
    recorder.close()
    return recorder.workload(type(run.ddp.module).__name__, dist.group.WORLD)


def _predicted(settings: Settings, workload: Workload) -> dict[str, dict[str, Any]]:
    group = dist.group.WORLD
    assert group is not None
    fabric, device = measure_link(group, budget_s=5), ThisDevice("cpu")
    found = {}
    for scheme in ("noop", *settings.schemes):
        dist.barrier()  # all ranks time the same scheme at once, as in training
        step = predict_step(
            made(scheme),
            workload,
            ranks=group.size(),
            fabric=fabric,
            device=device,
            cap_mb=25.0 if made(scheme).traits.rounds > 1 else CAP_MB,
        )
        found[scheme] = {"predicted": step.step_s, "wire": step.wire_s, "codec": step.codec_s}
    link = fabric.between
    found["noop"] |= {"latency": link.latency, "bandwidth": link.bandwidth}
    return found


def _rows(settings: Settings, hosts: int) -> list[dict[str, Any]]:
    rate = None if settings.rate is None else f"{settings.rate / 1e6:g}mbit"
    task = asdict(settings)
    messages = messages_from_hosts(
        *("experiments.network", task),
        hosts=hosts,
        rate=rate,
        delay_s=settings.delay_s,
        timeout=900,
    )
    rows = [message.content for message in messages]
    noop = next(row for row in rows if row["scheme"] == "noop")
    return [
        {
            "model": settings.model,
            "hosts": hosts,
            "mbit": None if settings.rate is None else settings.rate / 1e6,
            "delay_ms": 1e3 * settings.delay_s,
            "scheme": row["scheme"],
            "step_ms": 1e3 * statistics.median(row["times"]),
            "predicted_ms": 1e3 * row["predicted"],
            "over_noop": statistics.median(
                own / other for own, other in zip(row["times"], noop["times"], strict=True)
            ),
            "wire_ms": 1e3 * row["wire"],
            "codec_ms": 1e3 * row["codec"],
            "measured_latency_us": 1e6 * noop["latency"],
            "measured_mbit": 8e-6 * noop["bandwidth"],
            "error": row["predicted"] / statistics.median(row["times"]) - 1,
        }
        for row in rows
    ]


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table("hook", "step", "over noop", "predicted", "error", title=title)
    for row in rows:
        table.add_row(
            row["scheme"],
            f"{row['step_ms']:.1f} ms",
            f"{row['over_noop']:.2f}",
            f"{row['predicted_ms']:.1f} ms",
            f"{100 * row['error']:+.0f} %",
        )
    return table


def main(
    models: Annotated[str, typer.Option(help="Models, comma-separated.")] = ",".join(MODELS),
    rates: Annotated[str, typer.Option(help="Mbit/s; 0: unlimited.")] = "200,1000,10000,0",
    delays: Annotated[str, typer.Option(help="Delays of a message, ms.")] = "0",
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    schemes: Annotated[str, typer.Option(help="Hooks, separated by semicolons.")] = ";".join(
        SCHEMES
    ),
    turns: Annotated[int, typer.Option(help="Turns of all hooks.", min=5)] = 7,
    out: Annotated[Path, typer.Option(help="The table is written there.")] = Path(
        "results/network.csv"
    ),
) -> None:
    """Prints measured and predicted step times."""
    if reason := reason_not_to_run():
        sys.exit(f"experiments.network: {reason}")
    console, rows = Console(), []
    out.parent.mkdir(parents=True, exist_ok=True)
    for model in models.split(","):
        for rate, delay in product(map(float, rates.split(",")), map(float, delays.split(","))):
            some = tuple(schemes.split(";"))
            settings = Settings(model, some, rate * 1e6 or None, delay / 1e3, turns)
            new = _rows(settings, hosts)
            where = f"{rate:g} Mbit/s" if rate else "unlimited"
            if delay:
                where += f", {delay:g} ms one way"
            console.print(_table(new, f"{model}, {hosts} hosts, {where}"))
            rows += new
            pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")
    table = pd.DataFrame(rows)
    console.print(f"median error {100 * table.error.abs().median():.1f} %; wrote {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        run_rank(Settings(**json.loads(sys.argv[2])))
    else:
        typer.run(main)
