"""Teams of ranks that stay: processes with a Gloo group that run one function after the other.

A process of its own for every case costs ten times what the case does. A team is thrown away when
a rank raises, dies or hangs; the next one starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.tools.harness import (
    Died,
    _end,
    _failure_message,
    _Rank,
    _receive,
    _stacks,
    _start_rank,
    _start_store,
    _store_at,
)

__all__ = ["Team", "Trouble"]

_GRACE = 3.0  # seconds that the others have once a rank is in trouble
_LONGEST = 300.0  # seconds of a call, whatever it does
# A rank hangs that does nothing; one that is slow, on a machine that has other work, is not hung.
_NOTHING = 0.1  # seconds of CPU time of all ranks together, in ``patience``


@dataclass(frozen=True)
class Trouble:
    """The end of a rank that returned nothing: it raised, died or hung."""

    kind: str
    text: str


class Team:
    """``size`` ranks of one default group.

    Args:
        patience: seconds in which ranks do nothing before they count as hung.
        store: where they find one another: "file", or "tcp", in a process of its own.
    """

    def __init__(self, size: int, patience: float = 10.0, store: str = "file") -> None:
        self.patience, self.usable = patience, True
        self._directory = tempfile.TemporaryDirectory(prefix="team-")
        self._host, (_, port) = _start_store() if store == "tcp" else (None, (0, 0))
        arguments = size, self._directory.name, port
        self._ranks = [_start_rank(rank, _serve, rank, *arguments) for rank in range(size)]
        for rank in self._ranks:
            rank.stacks = Path(self._directory.name, f"stacks{rank.rank}")

    def run(self, function: Callable[..., Any], argument: Any) -> list[Any]:
        """Calls ``function(rank, size, argument)`` on every rank.

        Returns:
            By rank what it returned, or a ``Trouble``, after which the team is not usable.
        """
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has ended, as its pipe says below
                rank.pipe.send_bytes(pickle.dumps((function, argument)))
        waiting = list(self._ranks)
        deadline, used, since = time.monotonic() + _LONGEST, 0.0, time.monotonic()
        while waiting:
            pipes = [rank.pipe for rank in waiting]
            ready = connection.wait(pipes, timeout=min(1.0, self.patience / 4))
            now, busy = time.monotonic(), self._cpu_seconds()
            if ready or busy - used > _NOTHING:
                used, since = busy, now
            if now > deadline or now - since > self.patience:
                break
            for rank in [rank for rank in waiting if rank.pipe in ready]:
                waiting.remove(rank)
                _receive(rank, ())
                if rank.failure is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        results = [self._result(rank, hangs=rank in waiting) for rank in self._ranks]
        if any(isinstance(result, Trouble) for result in results):
            self.close()
        return results

    def _result(self, rank: _Rank, *, hangs: bool) -> Any:
        if hangs:
            return Trouble("hung", _stacks(rank))
        if rank.failure is None:
            return rank.value
        if not isinstance(rank.value, Died):
            return Trouble("raised", rank.failure)
        output = Path(self._directory.name, f"output{rank.rank}")
        if not output.exists():  # no case's fault
            raise RuntimeError(f"rank {rank.rank} did not start: {rank.failure}")
        return Trouble("died", f"{rank.failure}: {output.read_text()[-500:]}")

    def close(self) -> None:
        """Ends the processes."""
        if self.usable:
            self.usable = False
            _end(self._ranks)
            if self._host is not None:
                self._host.kill()
            self._directory.cleanup()

    def _cpu_seconds(self) -> float:
        """Returns the CPU time of all ranks so far."""
        ticks = 0
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                path = Path(f"/proc/{rank.process.pid}/stat")
                fields = path.read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


# ---- in the rank's process


def _serve(pipe: connection.Connection, rank: int, size: int, directory: str, port: int) -> None:
    """Joins the group and answers until the pipe ends."""
    import torch
    import torch.distributed as dist

    stacks = open(Path(directory, f"stacks{rank}"), "w")  # noqa: SIM115 (open as long as we live)
    output = os.open(Path(directory, f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 2)  # PyTorch's warnings by the thousand; shown where the process dies
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        store=_store_at(directory, port, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_LONGEST),
    )
    gc.collect()
    gc.freeze()  # what is loaded stays: collecting after every case is quick then
    while True:
        try:
            function, argument = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            message = pickle.dumps((function(rank, size, argument), None, None, 0.0))
        except Exception as error:
            message = _failure_message(error)
        pipe.send_bytes(message)
        del function, argument
        gc.collect()
