"""``python -m experiments.wire_bytes``: the ledger's wire bytes against what an interface sent.

Two hosts (network namespaces) joined by one virtual cable train some steps; each rank reads its own
interface's counter before and after. Needs root and ``ip`` (Debian: iproute2).
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from experiments.hosts import joined, reason_not_to_run, run_on_hosts, sent_nbytes

__all__ = ["CASES", "measure"]

# Name in the table -> scheme and options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("none", {}),
    "fp16": ("fp16", {}),
    "bf16, fp32 sum": ("bf16", {"fp32_sum": True}),
    "PowerSGD 4": ("powersgd", {"rank": 4}),
    "PowerSGD 8": ("powersgd", {"rank": 8}),
}
WIDTH, DEPTH, WARM_UP = 1024, 6, 3  # 25 MB of gradients a step
OUT = Path("results/wire_bytes.csv")


def measure(
    scheme: str,
    options: Mapping[str, Any] | None = None,
    *,
    steps: int = 20,
    timeout: float = 240,
) -> pd.DataFrame:
    """Trains ``steps`` steps with a hook on two hosts; a row per rank.

    Args:
        scheme: as for :func:`commhooks.register`.
        options: of the scheme; numbers, strings, booleans.
        timeout: seconds for the whole measurement.

    Returns:
        Columns rank, reported_bytes (the ledger's wire bytes), interface_bytes (what the counter
        grew by), baseline_bytes (of it, what a barrier alone sends), ratio ((interface - baseline)
        over reported; TCP and IP headers and acknowledgements are a few percent).

    Raises:
        RuntimeError: a rank failed; with its output.

    Example:
        >>> measure("powersgd", {"rank": 4})["ratio"].max() < 1.05
        True
    """
    task = {"scheme": scheme, "options": dict(options or {}), "steps": steps}
    rows = run_on_hosts("experiments.wire_bytes", task, timeout=timeout)
    frame = pd.DataFrame(rows).sort_values("rank", ignore_index=True)
    sent = frame["interface_bytes"] - frame["baseline_bytes"]
    frame["ratio"] = sent / frame["reported_bytes"]
    return frame


def _run_rank(scheme: str, options: Mapping[str, Any], steps: int) -> None:
    """Trains on one host and prints what was counted and what the ledger says."""
    with joined() as rank:
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
        row = {
            "rank": rank,
            "reported_bytes": float(counted["wire_bytes"].sum()),
            "interface_bytes": interface,
            "baseline_bytes": baseline,
        }
        print(json.dumps(row), flush=True)
        dist.barrier()
        hook.close()


def _train(ddp: DistributedDataParallel, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x).square().sum().backward()


def _counted(work: Any) -> int:
    """Bytes this rank's interface sends during ``work`` and one barrier after it."""
    dist.barrier()
    before = sent_nbytes()
    work()
    dist.barrier()
    return sent_nbytes() - before


def main() -> None:
    """Prints a table of all cases; ``--as-rank`` is how it starts its own ranks."""
    if sys.argv[1:2] == ["--as-rank"]:
        _run_rank(**json.loads(sys.argv[2]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces are removed
    reason = reason_not_to_run()
    if reason is not None:
        sys.exit(f"experiments.wire_bytes: {reason}")
    frames = []
    for name, (scheme, options) in CASES.items():
        frame = measure(scheme, options)
        frame.insert(0, "hook", name)
        frames.append(frame)
        print(f"{name}: {frame['ratio'].max():.4f}", flush=True)
    table = pd.concat(frames)
    print(table.to_string(index=False, float_format="{:.4f}".format))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(OUT, index=False)
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
