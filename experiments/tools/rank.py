"""Runs a worker in the process of a rank on a host.

:mod:`experiments.tools.hosts` starts it: ``python -m experiments.tools.rank MODULE:WORKER TASK``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from experiments.tools.processes import keep_to_own_cores, worker_named


def _send(value: Any) -> None:
    print(json.dumps(value), flush=True)


def _end_with_study() -> None:
    """Ends this rank when its standard input does, which a killed study closes."""
    # A rank would wait in a collective for ranks that are gone, until the timeout of the group.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def main(name: str, task: str) -> None:
    """Joins the process group with one thread, and runs the worker of that name."""
    worker = worker_named(name)
    # Ctrl-C reaches all processes of a terminal; the study handles it, and ends its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Hosts share no cores, as machines do not.
    keep_to_own_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    threading.Thread(target=_end_with_study, daemon=True).start()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    worker(dist.get_rank(), dist.get_world_size(), _send, **json.loads(task))
    # No rank closes its connections while another one still uses them.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
