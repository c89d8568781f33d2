"""Times FSDP2's reduce-scatter with schemes over limited links, and counts the memory they keep.

Run ``python -m experiments.sharded speed``. Hosts are network namespaces on one switch, with a rank
on each. A step's exposed reduction is what it takes beyond a step whose gradients are not reduced
at all (``noop``); all-gathers of parameters are in both. Cases take turns in one run.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import commhooks
from commhooks.wrappers import AveragedFeedback, ErrorFeedback
from experiments.tools.hosts import messages_from_hosts
from experiments.tools.namespaces import reason_not_to_run, sent_nbytes
from experiments.tools.processes import Send
from experiments.tools.tasks import CharTransformer
from experiments.tools.turns import in_turns, seconds_per_step

NATIVE32, NATIVE16, NOOP = "FSDP2, float32", "FSDP2, bf16", "noop"


@dataclass(frozen=True)
class Settings:
    """Describes a rank's run: width and depth of the model, number of turns."""

    width: int
    depth: int
    turns: int


def _schemes() -> dict[str, Any]:
    int4 = commhooks.make("int4", error_feedback=False)
    return {
        "none": "none",
        "bf16, float32 sum": commhooks.make("bf16", fp32_sum=True),
        "int8": "int8",
        "int4": int4,
        "int4, 8-bit feedback": AveragedFeedback(int4),
        "int4, feedback": ErrorFeedback(int4),
    }


class _Case:
    def __init__(self, name: str, settings: Settings) -> None:
        torch.manual_seed(0)
        model: Any = CharTransformer(64, settings.width, settings.depth)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        # Parameters travel in 16 bits in all cases, as people train.
        reduced = torch.bfloat16 if name == NATIVE16 else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.hook: commhooks.HookState | None = None
        if name not in (NATIVE32, NATIVE16):
            scheme = "noop" if name == NOOP else _schemes()[name]
            self.hook = commhooks.register(self.model, scheme)
        self.tokens = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(1))
        self.times: list[float] = []
        self.sent: list[float] = []

    def step(self, *, timed: bool = True) -> None:
        def work() -> None:
            before = sent_nbytes()
            self.model(self.tokens).float().square().mean().backward()
            self.model.zero_grad()
            sent.append(sent_nbytes() - before)

        sent: list[float] = []
        took = seconds_per_step(work)
        if timed:
            self.times.append(took)
            self.sent += sent

    def kept_nbytes(self) -> int:
        return 0 if self.hook is None else self.hook.engine.memory.nbytes()


def run_rank(rank: int, world_size: int, send: Send, **fields: Any) -> None:
    """Times the cases in turns in the process of a rank; rank 0 sends an object for each."""
    settings = Settings(**fields)
    names = [NATIVE32, NATIVE16, NOOP, *_schemes()]
    cases = {name: _Case(name, settings) for name in names}
    for case in cases.values():
        for _ in range(3):
            case.step(timed=False)
    in_turns({name: case.step for name, case in cases.items()}, settings.turns)
    entries = sum(parameter.numel() for parameter in cases[NOOP].model.parameters())
    if rank == 0:
        for name, case in cases.items():
            row = {"case": name, "times": case.times, "sent": case.sent}
            send(row | {"kept": case.kept_nbytes(), "entries": entries})


def _rows(measured: list[dict[str, Any]], **where: Any) -> list[dict[str, Any]]:
    by_name = {row["case"]: row for row in measured}

    def exposed(row: dict[str, Any]) -> float:
        pairs = zip(row["times"], by_name[NOOP]["times"], strict=True)
        return statistics.median(seconds - other for seconds, other in pairs)

    base = exposed(by_name[NATIVE16])
    return [
        {
            **where,
            "case": row["case"],
            "step_ms": 1e3 * statistics.median(row["times"]),
            "exposed_ms": 1e3 * exposed(row),
            "over_bf16": exposed(row) / base,
            "sent_mb": statistics.median(row["sent"]) / 1e6,
            "kept_bytes_per_entry": row["kept"] / row["entries"],
        }
        for row in measured
    ]


def main(
    rates: Annotated[str, typer.Option(help="Mbit/s, comma-separated.")] = "1000",
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    width: Annotated[int, typer.Option(help="Of the transformer.")] = 512,
    depth: Annotated[int, typer.Option(help="Of the transformer.")] = 4,
    turns: Annotated[int, typer.Option(help="Of all cases.", min=5)] = 9,
    out: Annotated[Path, typer.Option(help="The table.")] = Path("results/sharded/speed.csv"),
) -> None:
    """Prints step times, exposed reductions, bytes and memory."""
    if reason := reason_not_to_run():
        sys.exit(f"experiments.sharded speed: {reason}")
    out.parent.mkdir(parents=True, exist_ok=True)
    console, rows = Console(), []
    for rate in map(float, rates.split(",")):
        task = asdict(Settings(width, depth, turns))
        messages = messages_from_hosts(
            run_rank, task, hosts=hosts, rate=f"{rate:g}mbit", timeout=900
        )
        rows += _rows([message.content for message in messages], hosts=hosts, mbit=rate)
        pd.DataFrame(rows).to_csv(out, index=False, float_format="%.4g")
    table = Table("Mbit/s", "case", "step", "exposed", "over bf16", "sent", "kept per entry")
    for row in rows:
        table.add_row(
            f"{row['mbit']:g}",
            row["case"],
            f"{row['step_ms']:.0f} ms",
            f"{row['exposed_ms']:.0f} ms",
            f"{row['over_bf16']:.2f}",
            f"{row['sent_mb']:.2f} MB",
            f"{row['kept_bytes_per_entry']:.2f} B",
        )
    console.print(table)
