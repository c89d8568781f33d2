"""Runs the ranks of a study on hosts that are network namespaces of this machine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from experiments.namespaces import made_hosts
from experiments.processes import keep_to_own_cores

__all__ = ["Message", "joined", "messages_from_hosts", "run_on_hosts"]

ROOT = Path(__file__).resolve().parent.parent


class Message(NamedTuple):
    """Holds an object that a rank printed."""

    rank: int
    content: dict[str, Any]


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
        module: prints JSON objects, one per line; joins the group with :func:`joined`.
        task: argument of the module, passed as JSON.
        hosts: number of hosts, with one rank on each.
        rate: of each cable in each direction, as ``tc`` takes it ("1gbit"). None: unlimited.
        timeout: seconds for everything.

    Returns:
        The objects that the ranks printed, those of rank 0 first.

    Raises:
        RuntimeError: a rank failed; the message has its output.
        subprocess.TimeoutExpired: the ranks took longer.
    """
    messages = messages_from_hosts(module, task, hosts=hosts, rate=rate, timeout=timeout)
    return [message.content for message in sorted(messages, key=lambda message: message.rank)]


def messages_from_hosts(
    module: str,
    task: Mapping[str, Any],
    *,
    hosts: int = 2,
    rate: str | None = None,
    delay_s: float = 0.0,
    loss: float = 0.0,
    timeout: float = 240,
) -> Iterator[Message]:
    """Runs a module as :func:`run_on_hosts`, and yields each object when it is printed."""
    with made_hosts(rate, hosts, delay_s=delay_s, loss=loss) as enter, ExitStack() as stack:
        # Files, since a pipe of a rank that writes much would fill while nobody reads it.
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in enter]
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(_kill, ranks)
        for rank, host in enumerate(enter):
            ranks.append(_start([*host, sys.executable, "-m", module], rank, task, hosts, errors))
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
    task: Mapping[str, Any],
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
        [*command, "--as-rank", json.dumps(dict(task))],
        env=environment,
        stdin=subprocess.PIPE,  # never written to; it ends with the study, see _end_with_study
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


@contextmanager
def joined() -> Iterator[int]:
    """Joins the process group in the process of a rank, with one thread; yields the rank."""
    # Ctrl-C reaches all processes of a terminal; the study handles it, and ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Hosts share no cores, as machines do not.
    keep_to_own_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    threading.Thread(target=_end_with_study, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    yield dist.get_rank()
    # No rank closes its connections while another one still uses them.
    dist.barrier()
    dist.destroy_process_group()


def _end_with_study() -> None:
    """Ends this rank when its standard input does, which a killed study closes."""
    # A rank would wait in a collective for ranks that are gone, until the timeout of the group.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
