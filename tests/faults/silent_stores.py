"""Runs ranks until the host of their store falls silent, and reports how long each has waited.

The store's process is stopped, or rank 0 is that holds it, or the cable of rank 0 is cut. Cables
need root's network namespaces, see ``experiments/tools/namespaces.py``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NamedTuple

from experiments.tools import namespaces
from tests.tools.harness import _end, _start_rank, _start_store

MOMENTS = (
    *("register", "step", "switch", "state_dict", "change_group"),
    *("wait_for_all_ranks", "close"),
)
MORE = 3.0  # seconds beyond the timeout that a wait may take
_PATIENCE = 60.0  # seconds, after which a rank counts as hanging


class Case(NamedTuple):
    """A host that falls silent, and the moment."""

    fault: str
    kind: str
    moment: str


class Wait(NamedTuple):
    """Seconds that a rank waited, and the error that it met."""

    seconds: float
    text: str


# ---- in a rank


def _rank(
    pipe: connection.Connection, case: Case, rank: int, holder: int, port: int, timeout: float
) -> None:
    """Runs a rank; ``holder`` is a process in the network of its host, or 0."""
    import torch
    import torch.distributed as dist

    import commhooks
    import ddp_core
    from commhooks.hook._handshake import wait_for_all_ranks

    # Where these ranks end, and some of them abort, nobody looks.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    address = "127.0.0.1"
    if holder:
        _enter(holder)
        os.environ["GLOO_SOCKET_IFNAME"], address = "eth0", "10.99.0.1"
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    holds = rank == 0 and case.fault != "process"
    store: Any = dist.TCPStore(address, port, is_master=holds, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    of_core = case.kind == "core"
    wrap: Any = ddp_core if of_core else torch.nn.parallel
    model = wrap.DistributedDataParallel(torch.nn.Linear(64, 64))
    other = dist.new_group(timeout=limit)

    def step() -> None:
        model.zero_grad()
        model(torch.ones(2, 64)).sum().backward()

    hook: Any = None
    if case.moment != "register":
        hook = commhooks.register(model, "powersgd", rank=1)
        for _ in range(3):
            step()
    dist.barrier()
    pipe.send("ready")
    pipe.recv()
    if case.moment == "step" and case.fault == "process" and rank == 0:
        time.sleep(timeout + 2 * MORE)  # the other one waits
        os._exit(0)
    begin, message = time.monotonic(), "no error"
    try:
        if case.moment == "register":
            commhooks.register(model, "powersgd", rank=1)
        elif case.moment == "step":
            for _ in range(10**6):
                step()
        elif case.moment == "switch":
            hook.switch("bf16")
        elif case.moment == "state_dict":
            hook.state_dict(gather=True)
        elif case.moment == "change_group":
            hook.change_group(other)
        elif case.moment == "wait_for_all_ranks":
            wait_for_all_ranks("a call", dist.group.WORLD)  # type: ignore[arg-type]
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    if hook is not None:
        hook.close()
    pipe.send(Wait(time.monotonic() - begin, message))


def _enter(process: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{process}/ns/net") as network:
        if libc.setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


# ---- around them


def run(case: Case, timeout: float) -> list[Wait]:
    """Runs a case; returns the waits of the ranks that can tell.

    Args:
        timeout: of the process group, in seconds.
    """
    with ExitStack() as stack:
        holders, port = [0, 0], 29500
        if case.fault == "cable":
            enter = stack.enter_context(namespaces.made_hosts(None))
            holders = [int(words[words.index("--target") + 1]) for words in enter]
        elif case.fault == "process":
            store, (_, port) = _start_store()
            stack.callback(store.kill)
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        ranks = [
            _start_rank(rank, _rank, case, rank, holders[rank], port, timeout) for rank in range(2)
        ]
        stack.callback(_end, ranks)
        pipes = [rank.pipe for rank in ranks]
        for pipe in pipes:
            if not pipe.poll(_PATIENCE) or pipe.recv() != "ready":
                raise RuntimeError(f"{case}: a rank did not begin")
        if case.fault == "cable":
            subprocess.run([*enter[0], "ip", "link", "set", "eth0", "down"], check=True)
        else:
            silent = ranks[0].process if case.fault == "rank 0" else store
            os.kill(silent.pid, signal.SIGSTOP)
        for pipe in pipes:
            pipe.send("go")
        alone = case.fault == "rank 0" or (case.fault == "process" and case.moment == "step")
        return [_wait_of(pipe) for pipe in (pipes[1:] if alone else pipes)]


def _wait_of(pipe: connection.Connection) -> Wait:
    with suppress(EOFError):
        if pipe.poll(_PATIENCE):
            wait: Wait = pipe.recv()
            return wait
        return Wait(_PATIENCE, "hangs")
    return Wait(_PATIENCE, "ended without a word")
