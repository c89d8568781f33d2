"""``python -m experiments.wire_bytes``: the ledger's wire bytes against what an interface sent.

Two hosts (network namespaces) joined by one virtual cable train some steps; each rank reads its own
interface's counter before and after. Needs root and ``ip`` (Debian: iproute2).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks

__all__ = ["CASES", "measure", "reason_not_to_run"]

# Name in the table -> scheme and options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "allreduce": ("none", {}),
    "fp16": ("fp16", {}),
    "bf16, fp32 sum": ("bf16", {"fp32_sum": True}),
    "PowerSGD 4": ("powersgd", {"rank": 4}),
    "PowerSGD 8": ("powersgd", {"rank": 8}),
}
WIDTH, DEPTH, WARM_UP = 1024, 6, 3  # 25 MB of gradients a step
ROOT = Path(__file__).resolve().parent.parent
OUT = Path("results/wire_bytes.csv")


def reason_not_to_run() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is missing (Debian: apt-get install iproute2)"
    try:
        with _hosts():
            return None
    except RuntimeError as error:
        return str(error)


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
    task = json.dumps({"scheme": scheme, "options": dict(options or {}), "steps": steps})
    ranks: list[subprocess.Popen[str]] = []
    with _hosts() as hosts:
        try:
            ranks += [_start(host, rank, len(hosts), task) for rank, host in enumerate(hosts)]
            outputs = [process.communicate(timeout=timeout) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank ended with {process.returncode}:\n{errors[-3000:]}")
    rows = [json.loads(line) for out, _ in outputs for line in out.splitlines() if line[:1] == "{"]
    frame = pd.DataFrame(rows).sort_values("rank", ignore_index=True)
    sent = frame["interface_bytes"] - frame["baseline_bytes"]
    frame["ratio"] = sent / frame["reported_bytes"]
    return frame


def _start(host: str, rank: int, world_size: int, task: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": "29400",  # private to the namespaces
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "experiments.wire_bytes", "--as-rank", task]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def _hosts() -> Iterator[list[str]]:
    """Two namespaces with one cable between their ``eth0``; removed in any case."""
    names = [f"commhooks{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        peer = ["peer", "name", "eth0", "netns", names[1]]
        _ip("link", "add", "eth0", "netns", names[0], "type", "veth", *peer)
        for rank, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.99.0.{rank + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _sent() -> int:
    """Bytes ``eth0`` of this namespace has sent."""
    with open("/proc/self/net/dev") as table:
        for line in table:
            device, _, counts = line.partition(":")
            if device.strip() == "eth0":
                return int(counts.split()[8])
    raise RuntimeError("this namespace has no eth0")


def _run_rank(scheme: str, options: Mapping[str, Any], steps: int) -> None:
    """Trains on one host and prints what was counted and what the ledger says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    ddp = DistributedDataParallel(model)
    hook = commhooks.register(ddp, scheme, **options)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    _train(ddp, x, WARM_UP)
    baseline = _counted(lambda: None)
    interface = _counted(lambda: _train(ddp, x, steps))
    rows = hook.report()
    counted = rows[(rows["step"] >= WARM_UP) & (rows["step"] < WARM_UP + steps)]
    row = {
        "rank": dist.get_rank(),
        "reported_bytes": float(counted["wire_bytes"].sum()),
        "interface_bytes": interface,
        "baseline_bytes": baseline,
    }
    print(json.dumps(row), flush=True)
    dist.barrier()
    hook.close()
    dist.destroy_process_group()


def _train(ddp: DistributedDataParallel, x: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x).square().sum().backward()


def _counted(work: Any) -> int:
    """Bytes this rank's interface sends during ``work`` and one barrier after it."""
    dist.barrier()
    before = _sent()
    work()
    dist.barrier()
    return _sent() - before


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
