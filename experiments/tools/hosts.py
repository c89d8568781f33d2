"""Runs the ranks of a study on hosts that are network namespaces of this machine."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from experiments.tools.namespaces import made_hosts
from experiments.tools.processes import Worker, named

__all__ = ["Message", "messages_from_hosts", "run_on_hosts"]

ROOT = Path(__file__).resolve().parents[2]


class Message(NamedTuple):
    """Holds an object that a rank sent."""

    rank: int
    content: dict[str, Any]


def run_on_hosts(
    worker: Worker,
    task: Mapping[str, Any],
    *,
    hosts: int = 2,
    rate: str | None = None,
    timeout: float = 240,
) -> list[dict[str, Any]]:
    """Runs ``worker(rank, world_size, send, **task)`` on each host.

    Args:
        worker: a function of a module; what it sends travels as JSON.
        task: its arguments, which travel as JSON.
        hosts: number of hosts, with one rank on each.
        rate: of each cable in each direction, as ``tc`` takes it ("1gbit"). None: unlimited.
        timeout: seconds for everything.

    Returns:
        What the ranks sent, that of rank 0 first.

    Raises:
        RuntimeError: a rank failed; the message has its output.
        subprocess.TimeoutExpired: the ranks took longer.
    """
    messages = messages_from_hosts(worker, task, hosts=hosts, rate=rate, timeout=timeout)
    return [message.content for message in sorted(messages, key=lambda message: message.rank)]


def messages_from_hosts(
    worker: Worker,
    task: Mapping[str, Any],
    *,
    hosts: int = 2,
    rate: str | None = None,
    delay_s: float = 0.0,
    loss: float = 0.0,
    timeout: float = 240,
) -> Iterator[Message]:
    """Runs a worker as :func:`run_on_hosts`, and yields each object when it is sent."""
    with made_hosts(rate, hosts, delay_s=delay_s, loss=loss) as enter, ExitStack() as stack:
        # Files, since a pipe of a rank that writes much would fill while no process reads it.
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in enter]
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(_kill, ranks)
        for rank, host in enumerate(enter):
            process = [*host, sys.executable, "-m", "experiments.tools.rank", named(worker)]
            ranks.append(_start([*process, json.dumps(dict(task))], rank, hosts, errors))
        for rank, line in _lines(ranks, timeout, errors):
            if line[:1] == "{":  # torch and Gloo print lines of text, too
                yield Message(rank, json.loads(line))


def _lines(
    ranks: Sequence[subprocess.Popen[str]], timeout: float, errors: Sequence[IO[str]]
) -> Iterator[tuple[int, str]]:
    """Yields what the ranks print, until all have ended."""
    # A thread for each rank: reading from the pipes in turn would wait for one of them, while
    # another rank fails.
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def read(rank: int, out: IO[str]) -> None:
        with out:
            for line in out:
                lines.put((rank, line))
        lines.put((rank, None))

    readers = []
    for rank, process in enumerate(ranks):
        assert process.stdout is not None
        readers.append(threading.Thread(target=read, args=(rank, process.stdout), daemon=True))
        readers[-1].start()
    try:
        yield from _until_ended(lines, ranks, timeout, errors)
    finally:
        _kill(ranks)
        for reader in readers:
            reader.join()


def _until_ended(
    lines: queue.Queue[tuple[int, str | None]],
    ranks: Sequence[subprocess.Popen[str]],
    timeout: float,
    errors: Sequence[IO[str]],
) -> Iterator[tuple[int, str]]:
    running, deadline = len(ranks), time.monotonic() + timeout
    while running:
        try:
            rank, line = lines.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise subprocess.TimeoutExpired(ranks[0].args, timeout) from None
        if line is not None:
            yield rank, line
            continue
        running -= 1
        # Raised at once: the other ranks would wait for this one until their timeout.
        if ranks[rank].wait():
            errors[rank].seek(0)
            text = errors[rank].read()[-3000:]
            raise RuntimeError(f"rank {rank} ended with {ranks[rank].returncode}:\n{text}")


def _start(
    command: Sequence[str],
    rank: int,
    world_size: int,
    errors: Sequence[IO[str]],
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": "29400",  # any port is free: the namespaces are new
        "GLOO_SOCKET_IFNAME": "eth0",  # Gloo would look up the host name, which is the machine's
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,  # never written to; it ends with the study, see tools/rank.py
        stdout=subprocess.PIPE,
        stderr=errors[rank],
        text=True,
    )


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
