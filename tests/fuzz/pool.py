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
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.tools.harness import _context, _start_server

__all__ = ["Leave", "Team", "Trouble"]

_GRACE = 3.0  # seconds that the others have once a rank is in trouble
_LONGEST = 300.0  # seconds of a call, whatever it does
# A rank hangs that does nothing; one that is slow, on a machine that has other work, is not hung.
_NOTHING = 0.1  # seconds of CPU time of all ranks together, in ``patience``


@dataclass(frozen=True)
class Trouble:
    """The end of a rank that returned nothing: it raised, died or hung."""

    kind: str
    text: str


@dataclass(frozen=True)
class Leave:
    """Returned by a rank whose process is to end."""

    value: Any


class Team:
    """``size`` ranks of one default group.

    Args:
        patience: seconds in which ranks do nothing before they count as hung.
        store: where they find one another: "file", or "tcp", of which the first rank is the host.
    """

    def __init__(self, size: int, patience: float = 10.0, store: str = "file") -> None:
        _start_server()
        self.size, self.patience, self.store = size, patience, store
        self.usable = True
        self._directory = tempfile.mkdtemp(prefix="team-")
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, size, self._directory, theirs, store), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """Calls ``function(rank, size, argument)`` on every rank, each with its own argument.

        Returns:
            By rank what it returned, or a ``Trouble``. After one, and where a rank answered
            ``Leave``, the team is not usable.
        """
        results: list[Any] = [None] * self.size
        self._left = False
        for rank, argument in enumerate(arguments):
            try:
                self._pipes[rank].send_bytes(pickle.dumps((function, argument)))
            except OSError:
                results[rank] = Trouble("died", "the process had ended before")
        waiting = {self._pipes[r]: r for r in range(self.size) if results[r] is None}
        deadline, used, since = time.monotonic() + _LONGEST, 0.0, time.monotonic()
        while waiting:
            ready = connection.wait(list(waiting), timeout=min(1.0, self.patience / 4))
            now, busy = time.monotonic(), self._cpu_seconds()
            if ready or busy - used > _NOTHING:
                used, since = busy, now
            if now > deadline or now - since > self.patience:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                results[rank] = self._receive(rank)
                if isinstance(results[rank], Trouble):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in waiting.values():
            results[rank] = Trouble("hung", self._stacks(rank))
        if self._left or any(isinstance(result, Trouble) for result in results):
            self.close()
        return results

    def close(self) -> None:
        """Ends the processes."""
        self.usable = False
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._directory, ignore_errors=True)

    def _cpu_seconds(self) -> float:
        """Returns the CPU time of all ranks so far."""
        ticks = 0
        for process in self._processes:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _receive(self, rank: int) -> Any:
        try:
            kind, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5)
            output = Path(self._directory, f"output{rank}")
            code = self._processes[rank].exitcode
            if not output.exists():  # no case's fault
                raise RuntimeError(f"rank {rank} did not start: exit code {code}") from None
            return Trouble("died", f"exit code {code}: {output.read_text()[-500:]}")
        self._left |= kind == "left"
        return Trouble("raised", value) if kind == "raised" else value

    def _stacks(self, rank: int) -> str:
        process, path = self._processes[rank], Path(self._directory, f"stacks{rank}")
        if process.pid is None or process.exitcode is not None:
            return f"it ended with exit code {process.exitcode}"
        path.write_text("")
        os.kill(process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if "most recent call first" in path.read_text():
                break
        time.sleep(0.05)
        return path.read_text() or "(no stack came)"


# ---- in the rank's process


def _serve(
    rank: int, size: int, directory: str, pipe: connection.Connection, kind: str = "file"
) -> None:
    """Joins the group and answers until the pipe ends."""
    import torch
    import torch.distributed as dist

    # In append mode, so that the parent may empty it.
    stacks = open(Path(directory, f"stacks{rank}"), "a")  # noqa: SIM115 (open as long as we live)
    output = os.open(Path(directory, f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 2)  # PyTorch's warnings by the thousand; shown where the process dies
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        store=_store(kind, Path(directory, "store"), rank, size),
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
            answer = ("returned", function(rank, size, argument))
        except Exception:
            answer = ("raised", traceback.format_exc())
        if isinstance(answer[1], Leave):
            pipe.send_bytes(pickle.dumps(("left", answer[1].value)))
            os._exit(0)
        pipe.send_bytes(pickle.dumps(answer))
        del function, argument, answer
        gc.collect()


def _store(kind: str, path: Path, rank: int, size: int) -> Any:
    """Returns the store of a team; of TCP, the file has the port that the first rank was given."""
    import torch.distributed as dist

    if kind == "file":
        return dist.FileStore(str(path), size)
    if rank == 0:
        host = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(host.port))
        path.with_suffix(".new").rename(path)
        return host
    for _ in range(3000):
        if path.exists():
            return dist.TCPStore("127.0.0.1", int(path.read_text()), size, is_master=False)
        time.sleep(0.01)
    raise RuntimeError("the first rank has told no port")
