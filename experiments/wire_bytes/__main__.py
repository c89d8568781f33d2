"""Compares the wire bytes of the ledger with the bytes that a network interface sent.

Run ``python -m experiments.wire_bytes``. Two hosts (network namespaces) joined by a virtual cable
train some steps; each rank reads the counter of its interface before and after. Needs what
``experiments/tools/namespaces.py`` needs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.tools.hosts import run_on_hosts
from experiments.tools.namespaces import reason_not_to_run, sent_nbytes
from experiments.tools.processes import Send
from experiments.tools.tables import printed

__all__ = ["CASES", "measure"]

# By name in the table: scheme and options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("none", {}),
    "fp16": ("fp16", {}),
    "bf16, fp32 sum": ("bf16", {"fp32_sum": True}),
    "PowerSGD 4": ("powersgd", {"rank": 4}),
    "PowerSGD 8": ("powersgd", {"rank": 8}),
}
# 25 MB of gradients per step. In the warm-up DDP rebuilds its buckets, and connections are made.
WIDTH, DEPTH, WARM_UP = 1024, 6, 3


def measure(
    scheme: str,
    options: Mapping[str, Any] | None = None,
    *,
    steps: int = 20,
    timeout: float = 240,
) -> pd.DataFrame:
    """Trains ``steps`` steps with a hook on two hosts.

    Args:
        scheme: as for :func:`commhooks.register`.
        options: of the scheme; numbers, strings, booleans.
        steps: number of counted steps.
        timeout: seconds for the whole measurement.

    Returns:
        One row per rank, with columns rank, reported_bytes (wire bytes of the ledger),
        interface_bytes (by which the counter grew), baseline_bytes (the share of a barrier in
        them), ratio (interface_bytes without baseline_bytes, over reported_bytes; headers of TCP
        and IP, and acknowledgements, add a few percent).

    Raises:
        RuntimeError: a rank failed; the message has its output.

    Example:
        >>> measure("powersgd", {"rank": 4})["ratio"].max() < 1.05
        True
    """
    task = {"scheme": scheme, "options": dict(options or {}), "steps": steps}
    rows = run_on_hosts(count, task, timeout=timeout)
    frame = pd.DataFrame(rows).sort_values("rank", ignore_index=True)
    sent = frame["interface_bytes"] - frame["baseline_bytes"]
    frame["ratio"] = sent / frame["reported_bytes"]
    return frame


def count(
    rank: int, world_size: int, send: Send, *, scheme: str, options: Mapping[str, Any], steps: int
) -> None:
    """Trains in the process of a rank, and sends the bytes of the interface and of the ledger."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    ddp = DistributedDataParallel(model)
    hook = commhooks.register(ddp, scheme, **options)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
    _train(ddp, x, WARM_UP)
    baseline = _counted(lambda: None)
    interface = _counted(lambda: _train(ddp, x, steps))
    rows = hook.report()
    counted = rows[(rows["step"] >= WARM_UP) & (rows["step"] < WARM_UP + steps)]
    send(
        {
            "rank": rank,
            "reported_bytes": float(counted["wire_bytes"].sum()),
            "interface_bytes": interface,
            "baseline_bytes": baseline,
        }
    )
    dist.barrier()
    hook.close()


def _train(ddp: DistributedDataParallel, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x).square().sum().backward()


def _counted(work: Any) -> int:
    """Returns the bytes that this rank's interface sends during ``work`` and a barrier after it."""
    # The barrier lets the last bytes of this rank leave before the counter is read.
    dist.barrier()
    before = sent_nbytes()
    work()
    dist.barrier()
    return sent_nbytes() - before


def main(
    steps: Annotated[int, typer.Option(help="Counted steps of each hook.", min=1)] = 20,
    out: Annotated[Path, typer.Option(help="The table.")] = Path("results/wire_bytes.csv"),
) -> None:
    """Prints the bytes of the interface over those of the ledger."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs what removes the namespaces
    reason = reason_not_to_run()
    if reason is not None:
        sys.exit(f"experiments.wire_bytes: {reason}")
    frames = []
    for name, (scheme, options) in CASES.items():
        frame = measure(scheme, options, steps=steps)
        frame.insert(0, "hook", name)
        frames.append(frame)
        print(f"{name}: {frame['ratio'].max():.4f}", flush=True)
    printed(pd.concat(frames), out, digits=4)


if __name__ == "__main__":
    typer.run(main)
