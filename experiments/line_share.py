"""Measures how much of a limited line each collective uses on Gloo.

Run ``python -m experiments.line_share``. Hosts (network namespaces) on one switch, each with a
cable of given rate, run the collectives in turn on a payload of 25 MiB. ``share`` is the bytes that
a bandwidth-optimal algorithm sends, divided by the time and by the rate of the line: median of the
turns with its quartiles. Needs what ``experiments/namespaces.py`` needs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import torch.distributed as dist
import typer
from rich.progress import track

from ddp_core import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from experiments.hosts import joined, run_on_hosts
from experiments.namespaces import reason_not_to_run

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


def _measure(turns: int, rate: float) -> None:
    """Times the collectives in the process of a rank; rank 0 prints an object for each and turn."""
    with joined() as rank:
        world_size = dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        requests = _requests(world_size)
        for turn in range(turns + WARM_UP):
            for name, request in requests.items():
                dist.barrier()
                begin = time.perf_counter()
                request.issue(group).wait()
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, op=dist.ReduceOp.MAX)  # a collective is over on the last rank
                if rank == 0 and turn >= WARM_UP:
                    share = request.wire_nbytes(world_size) * 8 / float(took) / rate
                    print(json.dumps({"collective": name, "share": share}), flush=True)


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
        rows = run_on_hosts("experiments.line_share", task, hosts=count, rate=rate, timeout=600)
        table = pd.DataFrame(rows).groupby("collective", sort=False).share
        quartiles = table.quantile([0.25, 0.5, 0.75]).unstack()
        quartiles.columns = pd.Index(["q1", "share", "q3"])
        tables.append(quartiles.assign(hosts=count).reset_index())
    result = pd.concat(tables)[["hosts", "collective", "share", "q1", "q3"]]
    typer.echo(result.to_string(index=False, float_format="{:.2f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    result.to_csv(out, index=False)
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        _measure(**json.loads(sys.argv[2]))
    else:
        typer.run(main)
