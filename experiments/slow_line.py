"""Measures how much of the time is spent computing over slow lines, by period and codec.

Run ``python -m experiments.slow_line``. Four hosts (network namespaces) train a model of 30.8 M
parameters locally, with 25 ms of injected computing per step, and exchange how far the parameters
moved (DiLoCo) once per period. A row is one rate, period and plan: a codec, exchanged at once or
streaming; it stands beside the prediction, and beside what was published for the same model and
hosts with float32. Rows are appended to the table; what is there already is not measured again.
Needs what ``experiments/namespaces.py`` needs.

``--quality`` trains the character transformer with the plans instead, on four processes and three
seeds, and compares its loss with that of synchronous bf16 of the same seed.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.predict import (
    Device,
    Fabric,
    Link,
    ThisDevice,
    Workload,
    model,
    predict_local,
)
from commhooks.predict.link import measure_link
from experiments.hosts import joined, messages_from_hosts
from experiments.namespaces import reason_not_to_run
from experiments.network import made
from experiments.processes import Send, run_ranks
from experiments.tasks import TASKS

COMPUTE_S = 0.025
HOSTS = 4
PUBLISHED = Path(__file__).parent / "predictions" / "published" / "diloco.csv"
_RATES = {50: "50m", 1000: "1g"}  # of the published table


@dataclass(frozen=True)
class Plan:
    """Describes how parameters are exchanged.

    Attributes:
        every: steps between two exchanges of a parameter.
        codec: scheme, with options.
        fragments, delay: of streaming DiLoCo; 1 and 0: all at once, training waits.
    """

    every: int
    codec: str
    fragments: int = 1
    delay: int = 0

    def __str__(self) -> str:
        streaming = f", {self.fragments} parts, delay {self.delay}" if self.delay else ""
        return f"{self.codec}{streaming}"


CODECS = ("none", "bf16", "int8", "int4", "onebit", "topk")
# Exchanges that go on while training does: the delay is as long as the line needs, about.
STREAMING = {
    8: (Plan(8, "int4", 1, 7), Plan(8, "onebit", 1, 7), Plan(8, "topk", 1, 7)),
    32: (Plan(32, "int4", 4, 7), Plan(32, "onebit", 4, 7), Plan(32, "topk", 4, 7)),
    128: (Plan(128, "int4", 4, 31), Plan(128, "onebit", 4, 31), Plan(128, "topk", 4, 31)),
}
# For quality: the plans that spend 90 % of the time computing, and dense ones of their periods.
QUALITY = (
    Plan(8, "none"),
    Plan(8, "int4", 1, 7),
    Plan(8, "onebit", 1, 7),
    Plan(32, "none"),
    Plan(32, "onebit", 4, 7),
    Plan(128, "none"),
    Plan(128, "onebit", 4, 31),
)


def plans(every: int) -> tuple[Plan, ...]:
    """Returns the plans of a period."""
    return (*(Plan(every, codec) for codec in CODECS), *STREAMING.get(every, ()))


class _Parameters(nn.Module):
    """Holds parameters of the model's shapes, which move a little in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = [layer.shape for layer in model("diloco-30m").layers]
        self.all = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)

    @torch.no_grad()
    def step(self, number: int) -> None:
        """Moves some of the parameters, and sleeps until 25 ms are over."""
        end = time.perf_counter() + COMPUTE_S
        parameter = self.all[number % len(self.all)]
        parameter.add_(parameter, alpha=1e-3 * math.cos(number))
        time.sleep(max(end - time.perf_counter(), 0.0))


def run_rank(task: dict[str, Any]) -> None:
    """Trains in the process of a rank; rank 0 prints the seconds of each period."""
    plan, exchanges = Plan(**task["plan"]), task["exchanges"]
    with joined() as rank:
        parameters = _Parameters()
        outer = commhooks.DiLoCo(
            parameters,
            made(plan.codec),
            every=plan.every,
            fragments=plan.fragments,
            delay=plan.delay,
        )
        for step in range(plan.every * task["warm_up"]):
            if step % plan.every >= plan.every - plan.delay - 1:
                parameters.step(step)
            outer.step()
        dist.barrier()
        seconds = []
        for _ in range(exchanges):
            begin = time.perf_counter()
            for step in range(plan.every):
                parameters.step(step)
                outer.step()
            seconds.append(time.perf_counter() - begin)
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(json.dumps({"seconds": slowest.tolist()}), flush=True)


def link_of_rank(task: dict[str, Any]) -> None:
    """Measures line and codecs in the process of a rank; rank 0 prints them."""
    with joined() as rank:
        fabric, device = measure_link(budget_s=task["link_s"]), ThisDevice("cpu")
        shapes = (torch.Size((2048, 1024)),)
        codecs = {}
        for codec in CODECS:
            dist.barrier()  # all ranks compute at once, as in an exchange
            seconds = sum(device.parts(made(codec), shapes, HOSTS))
            codecs[codec] = seconds / shapes[0].numel()
        if rank == 0:
            print(json.dumps({"fabric": asdict(fabric), "codecs": codecs}), flush=True)


class _Timed(Device):
    """Takes the seconds per entry that a codec was measured to take."""

    def __init__(self, seconds_per_entry: float) -> None:
        super().__init__("measured", math.inf, 0.0, 1.0)
        object.__setattr__(self, "_seconds", seconds_per_entry)

    def parts(
        self, scheme: commhooks.Scheme, shapes: tuple[torch.Size, ...], ranks: int
    ) -> tuple[float, ...]:
        whole: float = self._seconds  # type: ignore[attr-defined]
        return (whole * sum(shape.numel() for shape in shapes),)


def _measured(plan: Plan, mbit: float, delay_ms: float, exchanges: int) -> float:
    """Returns the seconds of a period, the median of several."""
    task = {"plan": asdict(plan), "exchanges": exchanges, "warm_up": int(exchanges > 1)}
    (message,) = messages_from_hosts(
        "experiments.slow_line",
        task,
        hosts=HOSTS,
        rate=f"{mbit:g}mbit",
        delay_s=delay_ms / 1e3,
        timeout=600,
    )
    return statistics.median(message.content["seconds"])


def _published(mbit: float, every: int, plan: Plan) -> float:
    """Returns the published share of the time spent computing, for float32 at once."""
    if plan.codec != "none" or plan.delay or mbit not in _RATES:
        return math.nan
    table = pd.read_csv(PUBLISHED)
    cells = table[
        (table.algorithm == "diloco") & (table.period == every) & (table.rate == _RATES[int(mbit)])
    ]
    return float(cells.utilisation.median()) if len(cells) else math.nan


def _workload() -> Workload:
    return Workload("30.8 M", model("diloco-30m").layers, COMPUTE_S / 3, 2 * COMPUTE_S / 3)


def measure(mbits: list[float], everies: list[int], delay_ms: float, out: Path) -> None:
    """Measures all plans that the table does not have, and prints it."""
    console = Console()
    rows = pd.read_csv(out).to_dict("records") if out.exists() else []
    done = {(row["mbit"], row["delay_ms"], row["every"], row["plan"]) for row in rows}
    for mbit in mbits:
        (message,) = messages_from_hosts(
            "experiments.slow_line",
            {"link_s": 10.0},
            hosts=HOSTS,
            rate=f"{mbit:g}mbit",
            delay_s=delay_ms / 1e3,
        )
        found = message.content["fabric"]
        fabric = Fabric(**{**found, "between": Link(**found["between"]), "inside": None})
        for every in everies:
            for plan in plans(every):
                if (mbit, delay_ms, every, str(plan)) in done:
                    continue
                predicted = predict_local(
                    made(plan.codec),
                    _workload(),
                    every=every,
                    ranks=HOSTS,
                    fabric=fabric,
                    device=_Timed(message.content["codecs"][plan.codec]),
                    fragments=plan.fragments,
                    delay=plan.delay,
                )
                # One exchange of some minutes is as exact as three of a second.
                long = every * predicted.step_s > 12
                seconds = _measured(plan, mbit, delay_ms, 1 if long else 3)
                rows.append(
                    {
                        "mbit": mbit,
                        "delay_ms": delay_ms,
                        "every": every,
                        "plan": str(plan),
                        "computing": every * COMPUTE_S / seconds,
                        "predicted": predicted.utilisation,
                        "published": _published(mbit, every, plan),
                        "period_s": seconds,
                        "sent_mb": predicted.payload_nbytes / 1e6,
                    }
                )
                pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")
                row = rows[-1]
                console.print(
                    f"{mbit:g} Mbit/s, every {every}, {plan}: {row['computing']:.1%} of the time "
                    f"computing, predicted {row['predicted']:.1%}",
                    highlight=False,
                )
    console.print(f"wrote {out}")


# ---- quality


def train(rank: int, world_size: int, send: Send, seed: int, plan: Plan | None, steps: int) -> None:
    """Trains the character transformer; rank 0 sends its loss on held-out data."""
    torch.set_num_threads(1)
    task = TASKS["characters"](world_size, seed=seed)
    torch.manual_seed(seed)
    module = task.model()
    outer = None
    if plan is None:
        module = DistributedDataParallel(module)
        commhooks.register(module, "bf16")
    else:
        outer = commhooks.DiLoCo(
            module,
            made(plan.codec),
            every=plan.every,
            fragments=plan.fragments,
            delay=plan.delay,
            seed=seed,
        )
    optimizer = task.optimizer(module)
    for step in range(steps):
        data, target = task.batch(rank, step)
        optimizer.zero_grad()
        task.loss(module(data), target).backward()
        optimizer.step()
        if outer is not None:
            outer.step()
    loss, _ = task.evaluate(module)
    losses = torch.tensor([loss])
    dist.all_reduce(losses)  # local models differ by what is not exchanged yet
    if rank == 0:
        send({"loss": float(losses) / world_size})


def compare_quality(seeds: int, steps: int, out: Path) -> None:
    """Trains with all plans, and prints the gap to synchronous bf16."""
    rows: list[dict[str, Any]] = pd.read_csv(out).to_dict("records") if out.exists() else []
    done = {(row["seed"], row["plan"], row["every"]) for row in rows}
    cases: list[tuple[int, Plan | None]] = [
        (seed, plan) for seed in range(seeds) for plan in (None, *QUALITY)
    ]
    with Progress() as progress:
        bar = progress.add_task("runs", total=len(cases))
        for seed, plan in cases:
            name, every = ("synchronous bf16", 1) if plan is None else (str(plan), plan.every)
            if (seed, name, every) not in done:
                (message,) = run_ranks(train, HOSTS, seed, plan, steps)
                rows.append({"seed": seed, "every": every, "plan": name, **message})
                pd.DataFrame(rows).to_csv(out, index=False, float_format="%.5g")
            progress.advance(bar)
    Console().print(_gaps(pd.DataFrame(rows)))


def gaps(table: pd.DataFrame) -> Iterator[tuple[int, str, float, float]]:
    """Yields period, plan, mean gap of the loss to bf16, and the half width of its 95 % interval.

    Args:
        table: columns seed, every, plan and loss.
    """
    base = table[table.every == 1].set_index("seed").loss
    for (every, plan), some in table[table.every > 1].groupby(["every", "plan"], sort=False):
        values = (some.set_index("seed").loss - base).dropna()
        # Student's t for the few seeds that there are.
        t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.0)
        half = t * values.std() / math.sqrt(len(values)) if len(values) > 1 else math.nan
        yield int(every), str(plan), float(values.mean()), float(half)


def _gaps(rows: pd.DataFrame) -> Table:
    table = Table("every", "plan", "gap to bf16", "95 % interval", title="loss on held-out data")
    for every, plan, mean, half in gaps(rows):
        table.add_row(str(every), plan, f"{mean:+.3f}", f"{mean - half:+.3f} to {mean + half:+.3f}")
    return table


def main(
    mbits: Annotated[str, typer.Option(help="Rates, Mbit/s.")] = "5000,1000,200,50",
    everies: Annotated[str, typer.Option(help="Steps between exchanges.")] = "8,32,128",
    delay_ms: Annotated[float, typer.Option(help="Of a message, one way, ms.")] = 0.0,
    quality: Annotated[bool, typer.Option(help="Trains a smaller model instead.")] = False,
    seeds: Annotated[int, typer.Option(min=2)] = 3,
    steps: Annotated[int, typer.Option(min=128)] = 768,
    out: Annotated[Path, typer.Option(help="Folder for the tables.")] = Path("results/slow_line"),
) -> None:
    """Prints the share of the time that is spent computing, or the loss, of each plan."""
    out.mkdir(parents=True, exist_ok=True)
    if quality:
        compare_quality(seeds, steps, out / "quality.csv")
        return
    if reason := reason_not_to_run():
        sys.exit(f"experiments.slow_line: {reason}")
    numbers = [float(one) for one in mbits.split(",")]
    measure(numbers, [int(one) for one in everies.split(",")], delay_ms, out / "slow_line.csv")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        given = json.loads(sys.argv[2])
        (link_of_rank if "link_s" in given else run_rank)(given)
    else:
        typer.run(main)
