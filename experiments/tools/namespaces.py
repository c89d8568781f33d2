"""Makes hosts on one machine: network namespaces on one switch, each with a cable of a given rate.

For studies that need an interface without other traffic, to count bytes or to limit the rate. Needs
Linux, ``ip`` and ``tc`` (Debian: iproute2), ``unshare`` and ``nsenter`` (util-linux), and root or a
kernel that lets users make user namespaces.

A namespace exists as long as a process in it. The process that holds it reads from a pipe of the
study, so it ends with the study, even one that is killed: nothing has a name or is left over.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "AS_ROOT",
    "AS_USER",
    "Access",
    "access",
    "attempt",
    "burst_nbytes",
    "choose",
    "made_hosts",
    "reason_not_to_run",
    "sent_nbytes",
]

_WINDOW_NBYTES = 64 << 20
_DELAY = Path(__file__).with_name("delay.py")
# Debian installs `tc` where the PATH of users does not look.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
COMMANDS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class Access(NamedTuple):
    """Describes a way to make network namespaces, or why there is none.

    Attributes:
        kind: "root", "user" (inside a user namespace, without root) or "none".
        words: the same in words; for "none" the reason.
    """

    kind: str
    words: str

    @property
    def unshare(self) -> list[str]:
        """Returns the options of ``unshare`` for the first namespace."""
        return ["--user", "--map-root-user"] if self.kind == "user" else []

    @property
    def enter(self) -> list[str]:
        """Returns the options of ``nsenter`` for the user namespace of the first namespace."""
        # Without --preserve-credentials, nsenter would set the groups, which a user may not do.
        return ["--user", "--preserve-credentials"] if self.kind == "user" else []


AS_ROOT = Access("root", "network namespaces, made as root")
AS_USER = Access("user", "network namespaces inside a user namespace, made without root")


@cache
def access() -> Access:
    """Finds a way in which this process can make hosts, by making some."""
    return choose(attempt, is_root=hasattr(os, "geteuid") and os.geteuid() == 0)


def choose(attempt: Callable[[Access], str | None], *, is_root: bool) -> Access:
    """Returns the first way that works: as root for root, then in a user namespace.

    Args:
        attempt: tries a way; returns why it failed, or None.
        is_root: whether to try first without a user namespace. Root of a container may lack the
            right to, and a user namespace may still work there.
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


def attempt(way: Access) -> str | None:
    """Makes hosts in a way; returns why that failed, or None."""
    # With a rate: a kernel may have namespaces and no traffic control.
    try:
        with made_hosts("1gbit", way=way):
            return None
    except RuntimeError as error:
        return str(error)


def reason_not_to_run() -> str | None:
    """Returns why this machine cannot make network namespaces; None if it can."""
    way = access()
    return way.words if way.kind == "none" else None


@contextmanager
def made_hosts(
    rate: str | None,
    count: int = 2,
    *,
    delay_s: float = 0.0,
    loss: float = 0.0,
    way: Access | None = None,
) -> Iterator[list[list[str]]]:
    """Makes namespaces whose ``eth0`` are cables to one switch, for the time of the context.

    Args:
        rate: of each cable in each direction, as ``tc`` takes it ("1gbit"). None: unlimited.
        count: number of hosts; host i has the address 10.99.0.(i + 1).
        delay_s: seconds that a frame is on its way from host to host; half of a round trip.
        loss: share of the packets that get lost on the way; needs a delay.
        way: how to make them. None: the way that :func:`access` finds.

    Yields:
        For each host the words to put before a command that is to run there.

    Raises:
        RuntimeError: a namespace cannot be made.
    """
    if loss and not delay_s:
        raise ValueError("made_hosts(loss=...) needs delay_s=..., whose device loses the packets")
    way = way or access()
    if way.kind == "none":
        raise RuntimeError(f"hosts cannot be made here: {way.words}")
    with ExitStack() as stack:
        # The switch has a namespace, too: the machine's network does not see any of this. In a user
        # namespace the hosts are made from inside it, which gives the right to join them.
        switch_holder = stack.enter_context(_held("unshare", *way.unshare, "--net", "--"))
        inside = ["nsenter", *way.enter, "--target", str(switch_holder.pid)]
        holders = [
            stack.enter_context(_held(*inside, "--", "unshare", "--net", "--"))
            for _ in range(count)
        ]
        switch, *hosts = (
            ["nsenter", *way.enter, "--target", str(holder.pid), "--net", "--"]
            for holder in (switch_holder, *holders)
        )
        _run(*switch, "ip", "link", "add", "bridge", "type", "bridge")
        _run(*switch, "ip", "link", "set", "bridge", "up")
        for rank, host in enumerate(hosts):
            port = f"port{rank}"
            peer = ["peer", "name", "eth0", "netns", str(holders[rank].pid)]
            _run(*switch, "ip", "link", "add", port, "type", "veth", *peer)
            _run(*switch, "ip", "link", "set", port, "up")
            if not delay_s:
                _run(*switch, "ip", "link", "set", port, "master", "bridge")
            _run(*host, "ip", "link", "set", "lo", "up")
            _run(*host, "ip", "addr", "add", f"10.99.0.{rank + 1}/24", "dev", "eth0")
            _run(*host, "ip", "link", "set", "eth0", "up")
            if delay_s:
                # 4 MB, the default, are a window of 1 Gbit/s at 30 ms; long lines are given more.
                for name in ("tcp_rmem", "tcp_wmem"):
                    text = f"4096 131072 {_WINDOW_NBYTES}"
                    _run(*host, "sh", "-c", f"echo {text} > /proc/sys/net/ipv4/{name}")
            if rate is not None:
                # A qdisc limits what leaves a device: at the host what it sends, at the switch's
                # port what it receives.
                shape = ["tbf", "rate", rate, "burst", f"{burst_nbytes(rate)}b", "latency", "50ms"]
                _run(*host, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
                _run(*switch, "tc", "qdisc", "add", "dev", port, "root", *shape)
        if delay_s:
            _delay(stack, switch, count, delay_s, loss)
        yield hosts


def _delay(stack: ExitStack, switch: list[str], count: int, delay_s: float, loss: float) -> None:
    """Replaces each port on the switch by a device that delays what the host sends."""
    lines = [f"port{rank}:delayed{rank}:{delay_s}:{loss}" for rank in range(count)]
    stack.enter_context(_waiting(*switch, sys.executable, "-I", str(_DELAY), *lines))
    for rank in range(count):
        tap, port = f"delayed{rank}", f"port{rank}"
        _run(*switch, "ip", "link", "set", tap, "master", "bridge", "up")
        _run(*switch, "tc", "qdisc", "add", "dev", tap, "clsact")
        everything = ["u32", "match", "u32", "0", "0"]
        to_port = ["action", "mirred", "egress", "redirect", "dev", port]
        _run(*switch, "tc", "filter", "add", "dev", tap, "egress", *everything, *to_port)


def burst_nbytes(rate: str) -> int:
    """Returns the bytes that may leave at once: those of a millisecond, and 32 KiB at least.

    With a smaller burst a line does not reach 1 Gbit/s; with a larger one, small messages pass a
    slow line without delay.
    """
    match = re.fullmatch(r"([\d.]+)([kmg])bit", rate)
    if match is None:
        raise ValueError(f'rate= is a number of kbit, mbit or gbit, as "100mbit", got {rate!r}')
    bits_per_second = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
    return max(round(bits_per_second / 8 / 1000), 32 * 1024)


@contextmanager
def _held(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that ``command`` puts into a new namespace, and that waits there."""
    # The namespace is there once "ready" has come. ``cat`` ends with the pipe it reads from, which
    # the kernel closes when this process ends, however it ends.
    with _waiting(*command, "sh", "-c", "echo ready; exec cat") as holder:
        yield holder


@contextmanager
def _waiting(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that prints "ready" and ends with its standard input."""
    holder = subprocess.Popen(
        command,
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
    """Returns the bytes that ``eth0`` of this namespace has sent."""
    # Not /sys/class/net, which shows the namespace in which it was mounted.
    with open("/proc/self/net/dev") as table:
        for line in table:
            device, _, counts = line.partition(":")
            if device.strip() == "eth0":
                return int(counts.split()[8])
    raise RuntimeError("this namespace has no eth0")
