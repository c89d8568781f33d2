"""Starts the Gloo processes of a study on this machine, which send messages to the parent.

For studies only: training runs use torchrun.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Send", "Worker", "keep_to_own_cores", "named", "run_ranks", "worker_named"]

Send = Callable[[Any], None]
Worker = Callable[..., None]  # of rank, world size, Send, and what a study adds


def named(worker: Worker) -> str:
    """Returns a function of a module as text: "experiments.line_share.__main__:measure"."""
    module = worker.__module__
    if module == "__main__":  # of ``python -m``: the process of a rank has another one
        module = sys.modules[module].__spec__.name  # type: ignore[union-attr]
    return f"{module}:{worker.__qualname__}"


def worker_named(name: str) -> Worker:
    """Returns the function with a name that :func:`named` returned."""
    module, _, function = name.partition(":")
    worker: Worker = getattr(importlib.import_module(module), function)
    return worker


def keep_to_own_cores(rank: int, ranks: int) -> None:
    """Keeps a rank on its share of the cores; called before it starts threads.

    The scheduler would wake a rank's threads on the core where another rank computes, and they
    would wait for its next tick (4 ms). One value per bucket then costs 3 to 12 % of a step, and 0
    to 1 % on cores of its own.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])


def run_ranks(
    worker: Worker, world_size: int, *args: Any, own_cores: bool = False
) -> Iterator[Any]:
    """Runs ``worker(rank, world_size, send, *args)`` in each process; yields what they send.

    Args:
        own_cores: see :func:`keep_to_own_cores`.

    Raises:
        RuntimeError: a process failed; the message has its traceback.
    """
    # Spawned: a fork of a process that has used torch's threads may hang in its first kernel.
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        # A file, not a port: several studies may run at once.
        store = f"file://{folder}/store"
        processes = [
            context.Process(
                target=_rank,
                args=(named(worker), rank, world_size, store, messages, args, own_cores),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        ended = 0
        try:
            while ended < world_size:
                try:
                    kind, value = messages.get(timeout=1)
                except queue.Empty:
                    # A process that was killed sends nothing.
                    dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                    if dead:
                        raise RuntimeError(f"a process ended with exit code {dead[0]}") from None
                    continue
                if kind == "error":
                    raise RuntimeError(f"a process failed:\n{value}")
                if kind == "end":
                    ended += 1
                else:
                    yield value
        finally:
            for process in processes:
                process.join(timeout=10 if ended == world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _rank(
    worker: str,
    rank: int,
    world_size: int,
    store: str,
    messages: Any,
    args: Any,
    own_cores: bool,
) -> None:
    try:
        if own_cores:
            keep_to_own_cores(rank, world_size)
        # Ctrl-C reaches all processes of a terminal; the parent handles it, and ends its ranks.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)  # ranks share the cores
        dist.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        worker_named(worker)(rank, world_size, lambda value: messages.put(("value", value)), *args)
        dist.barrier()
        dist.destroy_process_group()
        messages.put(("end", rank))
    except Exception:
        messages.put(("error", traceback.format_exc()))
        sys.exit(1)
