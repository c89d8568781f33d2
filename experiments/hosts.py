"""Hosts on one machine: network namespaces on one switch, each with a cable as fast as asked.

For studies that need an interface of their own, to count bytes or to limit the rate. Needs Linux,
``ip`` and ``tc`` (Debian: iproute2), ``unshare`` and ``nsenter`` (util-linux), and root or a kernel
that lets users make user namespaces.

A namespace lives as long as a process in it. The one that holds it reads from a pipe, so that it
ends with the study, however the study ends: nothing has a name and nothing is left over.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = [
    "Access",
    "Message",
    "access",
    "choose",
    "joined",
    "messages_from_hosts",
    "reason_not_to_run",
    "run_on_hosts",
    "sent_nbytes",
]

ROOT = Path(__file__).resolve().parent.parent
# Debian keeps `tc` where users do not look.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
COMMANDS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class Access(NamedTuple):
    """A way to make network namespaces, or why there is none.

    Attributes:
        kind: "root", "user" (inside a user namespace, without root) or "none".
        words: the same in words; for "none" the reason.
    """

    kind: str
    words: str

    @property
    def unshare(self) -> list[str]:
        """What ``unshare`` is told for the first namespace."""
        return ["--user", "--map-root-user"] if self.kind == "user" else []

    @property
    def enter(self) -> list[str]:
        """What ``nsenter`` is told to get into it."""
        return ["--user", "--preserve-credentials"] if self.kind == "user" else []


class Message(NamedTuple):
    """An object that a rank printed."""

    rank: int
    content: dict[str, Any]


AS_ROOT = Access("root", "network namespaces, made as root")
AS_USER = Access("user", "network namespaces inside a user namespace, made without root")


@cache
def access() -> Access:
    """How this process can make hosts; found out by making some, once."""
    return choose(_attempt, is_root=hasattr(os, "geteuid") and os.geteuid() == 0)


def choose(attempt: Callable[[Access], str | None], *, is_root: bool) -> Access:
    """The first way that works: as root where this is root, then in a user namespace.

    Args:
        attempt: tries a way; returns why it failed, None if it worked.
        is_root: whether to try it without a user namespace first. Root in a container may not be
            allowed to, and a user namespace may still work there.
    """
    if not sys.platform.startswith("linux"):
        return Access("none", f"network namespaces need Linux, this is {sys.platform}")
    for command, package in COMMANDS.items():
        if shutil.which(command, path=PATH) is None:
            return Access("none", f"the command `{command}` is missing (Debian: {package})")
    reasons = []
    for way in (AS_ROOT, AS_USER) if is_root else (AS_USER,):
        reason = attempt(way)
        if reason is None:
            return way
        reasons.append(f"{way.kind} namespaces: {reason}")
    return Access("none", "; ".join(reasons))


def _attempt(way: Access) -> str | None:
    try:
        with _hosts("1gbit", way=way):
            return None
    except RuntimeError as error:
        return str(error)


def reason_not_to_run() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    found = access()
    return found.words if found.kind == "none" else None


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
        subprocess.TimeoutExpired: the ranks took longer.
    """
    found = messages_from_hosts(module, task, hosts=hosts, rate=rate, timeout=timeout)
    return [message.content for message in sorted(found, key=lambda message: message.rank)]


def messages_from_hosts(
    module: str,
    task: Mapping[str, Any],
    *,
    hosts: int = 2,
    rate: str | None = None,
    timeout: float = 240,
) -> Iterator[Message]:
    """As :func:`run_on_hosts`, but gives each object when it is printed, with its rank."""
    with _hosts(rate, hosts) as enter, ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in enter]
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(_kill, ranks)
        for rank, host in enumerate(enter):
            ranks.append(_start([*host, sys.executable, "-m", module], rank, task, hosts, errors))
        for rank, line in _lines(ranks, timeout, errors):
            if line[:1] == "{":
                yield Message(rank, json.loads(line))


def _lines(
    ranks: Sequence[subprocess.Popen[str]], timeout: float, errors: Sequence[IO[str]]
) -> Iterator[tuple[int, str]]:
    """What the ranks print, until all have ended."""
    found: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def read(rank: int, out: IO[str]) -> None:
        with out:
            for line in out:
                found.put((rank, line))
        found.put((rank, None))

    readers = []
    for rank, process in enumerate(ranks):
        assert process.stdout is not None
        readers.append(threading.Thread(target=read, args=(rank, process.stdout), daemon=True))
        readers[-1].start()
    try:
        yield from _until_ended(found, ranks, timeout, errors)
    finally:
        _kill(ranks)
        for reader in readers:
            reader.join()


def _until_ended(
    found: queue.Queue[tuple[int, str | None]],
    ranks: Sequence[subprocess.Popen[str]],
    timeout: float,
    errors: Sequence[IO[str]],
) -> Iterator[tuple[int, str]]:
    open_ones, deadline = len(ranks), time.monotonic() + timeout
    while open_ones:
        try:
            rank, line = found.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            raise subprocess.TimeoutExpired(ranks[0].args, timeout) from None
        if line is not None:
            yield rank, line
            continue
        open_ones -= 1
        if ranks[rank].wait():  # the others would wait for it
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
        "MASTER_PORT": "29400",  # private to the namespaces
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return subprocess.Popen(
        [*command, "--as-rank", json.dumps(dict(task))],
        env=environment,
        stdin=subprocess.PIPE,  # never written to: its end is the end of the study
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
    """In a rank's process: one thread, and the process group; gives the rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study hears it, and ends its ranks
    threading.Thread(target=_end_with_study, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    yield dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


def _end_with_study() -> None:
    """A study that was killed ends no ranks; collectives of theirs would wait for minutes."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


@contextmanager
def _hosts(
    rate: str | None, count: int = 2, *, way: Access | None = None
) -> Iterator[list[list[str]]]:
    """Namespaces whose ``eth0`` are cables to one switch; gives how to run something in each."""
    way = way or access()
    if way.kind == "none":
        raise RuntimeError(f"hosts cannot be made here: {way.words}")
    with ExitStack() as stack:
        first = stack.enter_context(_held("unshare", *way.unshare, "--net", "--"))
        inside = ["nsenter", *way.enter, "--target", str(first.pid)]
        others = [
            stack.enter_context(_held(*inside, "--", "unshare", "--net", "--"))
            for _ in range(count)
        ]
        switch, *enter = (
            ["nsenter", *way.enter, "--target", str(one.pid), "--net", "--"]
            for one in (first, *others)
        )
        _run(*switch, "ip", "link", "add", "bridge", "type", "bridge")
        _run(*switch, "ip", "link", "set", "bridge", "up")
        for rank, host in enumerate(enter):
            port = f"port{rank}"
            peer = ["peer", "name", "eth0", "netns", str(others[rank].pid)]
            _run(*switch, "ip", "link", "add", port, "type", "veth", *peer)
            _run(*switch, "ip", "link", "set", port, "master", "bridge", "up")
            _run(*host, "ip", "link", "set", "lo", "up")
            _run(*host, "ip", "addr", "add", f"10.99.0.{rank + 1}/24", "dev", "eth0")
            _run(*host, "ip", "link", "set", "eth0", "up")
            if rate is not None:
                shape = ["tbf", "rate", rate, "burst", f"{_burst(rate)}b", "latency", "50ms"]
                _run(*host, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
                _run(*switch, "tc", "qdisc", "add", "dev", port, "root", *shape)
        yield enter


def _burst(rate: str) -> int:
    """Bytes that may leave at once: what the line sends in a millisecond, and 32 KiB at least.

    Fewer, and 1 Gbit/s is not reached; more, and small messages pass a slow line for free.
    """
    found = re.fullmatch(r"([\d.]+)([kmg])bit", rate)
    if found is None:
        raise ValueError(f'rate= is a number of kbit, mbit or gbit, as "100mbit", got {rate!r}')
    bits_per_second = float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]
    return max(round(bits_per_second / 8 / 1000), 32 * 1024)


@contextmanager
def _held(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that ``command`` puts into a new namespace, which stays while it reads."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo ready; exec cat"],
        env={**os.environ, "PATH": PATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:  # closes the pipes and waits
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)}: {holder.stderr.read().strip()}")
        try:
            yield holder
        finally:
            with suppress(ProcessLookupError):
                holder.kill()


def _run(*command: str) -> None:
    environment = {**os.environ, "PATH": PATH}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
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
