"""Measures how much of a limited line each collective uses on Gloo.

Run ``python -m experiments.line_share``. Hosts (network namespaces) on one switch, each with a
cable of given rate, run the collectives in turn on a payload of 25 MiB. ``share`` is the bytes that
a bandwidth-optimal algorithm sends, divided by the time and by the rate of the line: median of the
turns with its quartiles. Needs what ``experiments/tools/namespaces.py`` needs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.progress import track

from ddp_core import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from experiments.tools.hosts import run_on_hosts
from experiments.tools.namespaces import reason_not_to_run
from experiments.tools.processes import Send
from experiments.tools.tables import printed
from experiments.tools.turns import seconds_per_step

BYTES, WARM_UP = 25 * 2**20, 1


def _requests(world_size: int) -> dict[str, Collective]:
    """Returns the collectives by name, each of 25 MiB."""
    # Multiples of the number of ranks, so that the bandwidth-optimal bytes are exact.
    entries = BYTES // 4 // world_size * world_size
    part = BYTES // world_size // 16 * 16
    return {
        "all-reduce, float32": AllReduce(torch.ones(entries), "sum"),
        "all-reduce, int8": AllReduce(torch.zeros(BYTES, dtype=torch.int8), "sum"),
        "all-to-all, bytes": AllToAll(torch.zeros(world_size, part, dtype=torch.uint8)),
        "all-gather, bytes": AllGather(torch.zeros(part, dtype=torch.uint8)),
        "reduce-scatter, float32": ReduceScatter(torch.ones(world_size, entries // world_size)),
    }


def measure(rank: int, world_size: int, send: Send, *, turns: int, rate: float) -> None:
    """Times the collectives in the process of a rank; rank 0 sends a share for each and turn."""
    group = dist.group.WORLD
    assert group is not None
    requests = _requests(world_size)
    for turn in range(turns + WARM_UP):
        for name, request in requests.items():
            # A collective is over on the last rank.
            took = seconds_per_step(lambda request=request: request.issue(group).wait())
            if rank == 0 and turn >= WARM_UP:
                share = request.wire_nbytes(world_size) * 8 / took / rate
                send({"collective": name, "share": share})


def main(
    gbit: Annotated[float, typer.Option(help="Rate of each cable, Gbit/s.")] = 1.0,
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, comma-separated.")] = "2,4",
    turns: Annotated[int, typer.Option(help="Turns per collective.", min=5)] = 7,
    out: Annotated[Path, typer.Option(help="The table is written there.")] = Path(
        "results/line_share.csv"
    ),
) -> None:
    """Prints the shares."""
    if reason := reason_not_to_run():
        sys.exit(f"experiments.line_share: {reason}")
    tables = []
    for count in track([int(number) for number in hosts.split(",")], "hosts"):
        task = {"turns": turns, "rate": gbit * 1e9}
        rate = f"{gbit * 1000:.0f}mbit"
        rows = run_on_hosts(measure, task, hosts=count, rate=rate, timeout=600)
        table = pd.DataFrame(rows).groupby("collective", sort=False).share
        quartiles = table.quantile([0.25, 0.5, 0.75]).unstack()
        quartiles.columns = pd.Index(["q1", "share", "q3"])
        tables.append(quartiles.assign(hosts=count).reset_index())
    result = pd.concat(tables)[["hosts", "collective", "share", "q1", "q3"]]
    printed(result, out, digits=2)


if __name__ == "__main__":
    typer.run(main)
