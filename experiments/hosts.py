"""Hosts on one machine: network namespaces on one switch, each with a cable as fast as asked.

For studies that need an interface of their own, to count bytes or to limit the rate. Needs root and
``ip`` and ``tc`` (Debian: iproute2).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["joined", "reason_not_to_run", "run_on_hosts", "sent_nbytes"]

ROOT = Path(__file__).resolve().parent.parent


def reason_not_to_run() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command `{command}` is missing (Debian: apt-get install iproute2)"
    try:
        with _hosts(None):
            return None
    except RuntimeError as error:
        return str(error)


def run_on_hosts(
    module: str,
    task: Mapping[str, Any],
    *,
    hosts: int = 2,
    rate: str | None = None,
    timeout: float = 240,
) -> list[dict[str, Any]]:
    """Runs ``python -m module --as-rank TASK`` on each host.

    Args:
        module: prints JSON objects, one a line; joins the group with :func:`joined`.
        task: what it is given, as JSON.
        hosts: how many; one rank on each.
        rate: of each cable in each direction, as ``tc`` takes it ("1gbit"); None: unlimited.
        timeout: seconds for everything.

    Returns:
        The objects that the ranks printed, rank 0's first.

    Raises:
        RuntimeError: a rank failed; with its output.
    """
    ranks: list[subprocess.Popen[str]] = []
    with _hosts(rate, hosts) as names:
        try:
            for rank, host in enumerate(names):
                ranks.append(_start(module, host, rank, hosts, json.dumps(dict(task))))
            outputs = [process.communicate(timeout=timeout) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank ended with {process.returncode}:\n{errors[-3000:]}")
    return [json.loads(line) for out, _ in outputs for line in out.splitlines() if line[:1] == "{"]


def _start(module: str, host: str, rank: int, world_size: int, task: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": "29400",  # private to the namespaces
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", host, sys.executable, "-m", module, "--as-rank", task],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def joined() -> Iterator[int]:
    """In a rank's process: one thread, and the process group; gives the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _hosts(rate: str | None, count: int = 2) -> Iterator[list[str]]:
    """Namespaces whose ``eth0`` are cables to one switch; removed in any case."""
    names = [f"commhooks{os.getpid()}-{rank}" for rank in range(count)]
    switch = f"commhooks{os.getpid()}-switch"
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            peer = ["peer", "name", port, "netns", switch]
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"10.99.0.{rank + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            if rate is not None:  # a millisecond's worth of tokens at 1 Gbit/s, 50 ms of queue
                shape = ["tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)
                _run("tc", "-n", switch, "qdisc", "add", "dev", port, "root", *shape)
        yield names
    finally:
        for name in (*names, switch):  # the cables go with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def sent_nbytes() -> int:
    """Bytes ``eth0`` of this namespace has sent."""
    with open("/proc/self/net/dev") as table:
        for line in table:
            device, _, counts = line.partition(":")
            if device.strip() == "eth0":
                return int(counts.split()[8])
    raise RuntimeError("this namespace has no eth0")
