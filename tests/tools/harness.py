"""Real processes with a Gloo group: ``run_ranks`` calls a function on every rank.

``on_ranks`` makes a test of a function that asserts on the ranks itself.

Importing torch takes seconds on a small machine, so ranks are forked from a server that has
imported everything already (``multiprocessing``'s forkserver, which has no threads and no group).
``run_ranks`` gets new processes with every call, which may be killed or left in any state. Tests of
``on_ranks`` that follow one another in a file share their processes, as long as all succeed: each
has a group of its own, and leaves the process as it was.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import pytest

_PRELOAD = ["tests.tools.preloaded"]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
}
# Files whose ranks meet in a TCPStore, in a process of its own as under torchrun; others do in a
# FileStore, which starts faster and cannot fall silent.
_OVER_TCP = ("test_ddp_abandoned", "test_ddp_faults", "test_handshake", "test_silent_store")
_TORCHS_OWN = ("Sparse invariant checks are implicitly disabled",)  # 2.11, whatever it is told
_GRACE = 3.0  # seconds that the other ranks have to end by themselves once one has failed

_context = get_context("forkserver")


class RankError(AssertionError):
    """A rank raised, died or hung; ``ranks`` are those that did, the message has their stacks."""

    def __init__(self, message: str, ranks: Collection[int]) -> None:
        super().__init__(message)
        self.ranks = sorted(ranks)


@dataclass(frozen=True)
class Died:
    """The value of a rank that was allowed to die: its exit code, negative for a signal."""

    exitcode: int | None


@dataclass
class _Rank:
    """A running rank, seen from the test."""

    rank: int
    process: Any
    pipe: connection.Connection
    stacks: Path = Path()
    value: Any = None
    failure: str | None = None
    cause: BaseException | None = None
    failed_at: float = 0.0


@dataclass(frozen=True)
class _Job:
    """A call of a worker on a rank."""

    worker: Callable[..., Any]
    rank: int
    world_size: int
    args: tuple[Any, ...]
    directory: str
    pg_timeout: float
    store: tuple[int, int]  # process and port of a TCPStore; zeros: there is none
    ignore_warnings: tuple[str, ...]
    stays: bool  # whether the process waits for another job


def run_ranks(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    pg_timeout: float = 30,
    may_die: Collection[int] = (),
    ignore_warnings: tuple[str, ...] = (),
) -> list[Any]:
    """Calls ``worker(rank, world_size, *args)`` in a process per rank; returns their values.

    Each rank has a Gloo process group and one torch thread. Warnings are errors.

    Args:
        worker: a function at the top of an importable module.
        args: picklable, as is what ``worker`` returns.
        timeout: seconds for everything; then all ranks are killed.
        pg_timeout: seconds of a collective.
        may_die: ranks that may end without returning; their value is then ``Died(exitcode)``.
        ignore_warnings: starts of messages (regular expressions) that are no errors.

    Raises:
        RankError: a rank raised (first traceback first), died, or did not end in time (stacks).
    """
    ranks = [_start_rank(rank) for rank in range(world_size)]
    try:
        _run_on(ranks, worker, args, timeout, pg_timeout, may_die, ignore_warnings)
    finally:
        _end(ranks)
    return [rank.value for rank in ranks]


def _run_on(
    ranks: list[_Rank],
    worker: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float = 60,
    pg_timeout: float = 30,
    may_die: Collection[int] = (),
    ignore_warnings: tuple[str, ...] = (),
    stays: bool = False,
) -> None:
    """Runs a worker on ranks that wait for one, with arguments as of ``run_ranks``."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        host, store = None, (0, 0)
        if worker.__module__.rpartition(".")[2] in _OVER_TCP:
            host, store = _start_store()
        common = args, directory, pg_timeout, store, ignore_warnings, stays
        try:
            for rank in ranks:
                rank.stacks = Path(directory, f"stacks{rank.rank}")
                # Plain pickle: multiprocessing's own would share tensors' memory, which dies with
                # the process.
                job = _Job(worker, rank.rank, len(ranks), *common)
                rank.pipe.send_bytes(pickle.dumps(job))
            _collect(ranks, time.monotonic() + timeout, may_die)
        finally:
            if host is not None:
                host.kill()
                host.join()


def _process_state() -> dict[str, dict[str, Any]]:
    """Returns what a test has to leave as it was: settings, and what modules hold."""
    import torch

    from commhooks.core import _registry

    settings: dict[str, Any] = {
        "environment": dict(os.environ),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "schemes": set(_registry._factories),
    }
    for name in ("commhooks", "ddp_core"):
        log = logging.getLogger(name)
        settings[f"log of {name}"] = log.level, tuple(log.handlers)
    return {"": settings} | {
        name: vars(module).copy()
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("commhooks", "ddp_core")
    }


def _changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Returns names of settings, functions, classes and plain values that are other ones now.

    Other objects of a module may change, as a cache does. They are told apart only where something
    changed: to ask it of all that modules hold took a sixth of all tests' time.
    """
    return [
        f"{module}.{name}".lstrip(".")
        for module, values in before.items()
        for name, was in values.items()
        if (now := after.get(module, {}).get(name)) is not was
        and (not module or inspect.isroutine(was) or isinstance(was, (int, float, str, type)))
        and now != was
    ]


_waiting: dict[int, list[_Rank]] = {}  # ranks that tests of a file have left, by their number
_waiting_of = ""


def _ranks_for(module: str, world_size: int) -> list[_Rank]:
    """Ranks that a test of the same file has left, or new ones."""
    global _waiting_of
    if _waiting_of != module:
        _waiting_of = module
        while _waiting:
            _end(_waiting.popitem()[1])
    if world_size in _waiting:
        return _waiting.pop(world_size)
    return [_start_rank(rank) for rank in range(world_size)]


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a test of a function that every rank runs and that leaves no process in another state.

    The function takes ``rank``, ``world_size`` or both, beside what pytest passes to the test.

    Args:
        world_sizes: the number of ranks; the test runs once for each of several.
        options: as of ``run_ranks``, but for ``may_die``.
    """

    def test_of(function: Callable[..., None]) -> Callable[..., None]:
        names = inspect.signature(function).parameters
        assert not hasattr(function, "pytestmark"), "put on_ranks below the marks of pytest"

        def test(world_size: int = world_sizes[0], **arguments: Any) -> None:
            ranks = _ranks_for(test.__module__, world_size)
            try:
                _run_on(ranks, test, (arguments,), **options, stays=True)
            except BaseException:
                _end(ranks)
                raise
            _waiting[world_size] = ranks

        def on_rank(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
            global _state_left
            given = {"rank": rank, "world_size": world_size, **arguments}
            before = _state_left or _process_state()
            value = function(**{name: given[name] for name in names})
            assert value is None, f"the test asserts nothing, it returned {value!r}"
            _state_left = _process_state()
            left = _changed(before, _state_left)
            assert not left, f"the test has left other values to the next test: {left}"

        passed = [p for name, p in names.items() if name not in ("rank", "world_size")]
        if len(world_sizes) > 1:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            passed.append(inspect.Parameter("world_size", kind))
        test.__name__, test.__qualname__ = function.__name__, function.__qualname__
        test.__module__, test.__doc__ = function.__module__, function.__doc__
        test.__signature__ = inspect.Signature(passed)  # type: ignore[attr-defined]
        test.on_rank = on_rank  # type: ignore[attr-defined]
        if len(world_sizes) > 1:
            return pytest.mark.parametrize("world_size", world_sizes)(test)  # type: ignore[no-any-return]
        return test

    return test_of


_server_runs = False


def _start_server() -> None:
    global _server_runs
    if not _server_runs:
        _context.set_forkserver_preload(_PRELOAD)
        with _environment(_ENVIRONMENT):
            ensure_running()
        _server_runs = True


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _start_store() -> tuple[Any, tuple[int, int]]:
    """Starts the process that holds a TCPStore; also returns its number and the port."""
    _start_server()
    parent_end, child_end = _context.Pipe(duplex=False)
    process = _context.Process(target=_hold_store, args=(child_end,), daemon=True)
    process.start()
    child_end.close()
    port = parent_end.recv()
    parent_end.close()
    assert process.pid is not None
    return process, (process.pid, port)


def _start_rank(rank: int, main: Callable[..., None] | None = None, *arguments: Any) -> _Rank:
    """Starts a process that calls ``main`` with its end of the pipe and the arguments."""
    _start_server()
    parent_end, child_end = _context.Pipe()
    process = _context.Process(target=main or _main, args=(child_end, *arguments), daemon=True)
    process.start()
    child_end.close()
    return _Rank(rank, process, parent_end)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        rank.process.join()
        rank.pipe.close()


def _collect(ranks: list[_Rank], deadline: float, may_die: Collection[int]) -> None:
    """Waits until all ranks have ended; raises if one did not do well."""
    running = list(ranks)
    failed: list[_Rank] = []
    while running:
        left = deadline - time.monotonic()
        ready = connection.wait([rank.pipe for rank in running], timeout=max(left, 0))
        if not ready:
            break
        for rank in [rank for rank in running if rank.pipe in ready]:
            running.remove(rank)
            _receive(rank, may_die)
            if rank.failure is not None:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + _GRACE)
    failed.sort(key=lambda rank: rank.failed_at)
    hung = {rank.rank: _stacks(rank) for rank in running}
    parts = [f"rank {rank.rank} failed:\n{rank.failure}" for rank in failed]
    parts += [f"rank {number} hung in:\n{stacks}" for number, stacks in hung.items()]
    if parts:
        cause = failed[0].cause if failed else None
        raise RankError("\n".join(parts), [rank.rank for rank in failed] + list(hung)) from cause


def _receive(rank: _Rank, may_die: Collection[int]) -> None:
    try:
        rank.value, rank.failure, rank.cause, rank.failed_at = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join()
        rank.value = Died(rank.process.exitcode)
        if rank.rank not in may_die:
            rank.failure = f"process ended with exit code {rank.process.exitcode}, returned nothing"


def _stacks(rank: _Rank) -> str:
    """The stacks of a hanging rank."""
    if rank.process.pid is None or rank.process.exitcode is not None:
        return f"nowhere: it ended with exit code {rank.process.exitcode}"
    os.kill(rank.process.pid, signal.SIGUSR1)
    text = ""
    for _ in range(20):
        time.sleep(0.1)
        text = rank.stacks.read_text() if rank.stacks.exists() else ""
        if "most recent call first" in text:
            break
    return text or "(no stack came)"


# ---- in the rank's process

_store_process = 0
_state_left: dict[str, dict[str, Any]] = {}  # by the test before, if one shared the process


def store_process() -> int:
    """The process that holds the TCPStore of the ranks, to stop it."""
    return _store_process


def _hold_store(pipe: connection.Connection) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def _store_at(directory: str, port: int, world_size: int) -> Any:
    """Returns the store of a group: behind the port, or a file where there is none."""
    import torch.distributed as dist

    if port:
        return dist.TCPStore("127.0.0.1", port, is_master=False)
    return dist.FileStore(str(Path(directory, "store")), world_size)


def _main(pipe: connection.Connection) -> None:
    """Runs jobs, and sends (value, traceback, exception, when) of each; ends after a failure."""
    stays, is_first = True, True
    while stays:
        pickled = pipe.recv_bytes()
        if not is_first:
            gc.collect()  # of what the job before has left
        is_first = False
        try:
            job = pickle.loads(pickled)
            stays = job.stays
            message = pickle.dumps((_run(job), None, None, 0.0))
        except BaseException as error:  # whatever it is, the test has to see it
            message, stays = _failure_message(error), False
        pipe.send_bytes(message)
    pipe.close()


def _failure_message(error: BaseException) -> bytes:
    text, now = traceback.format_exc(), time.monotonic()
    try:
        message = pickle.dumps((None, text, error, now))
        pickle.loads(message)
    except Exception:  # not every exception can be pickled; the text always can
        return pickle.dumps((None, text, None, now))
    return message


def _run(job: _Job) -> Any:
    import torch
    import torch.distributed as dist

    with open(Path(job.directory, f"stacks{job.rank}"), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        warnings.resetwarnings()
        warnings.simplefilter("error")
        for message in (*_TORCHS_OWN, *job.ignore_warnings):
            warnings.filterwarnings("ignore", message)
        global _store_process
        _store_process, port = job.store
        store = _store_at(job.directory, port, job.world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.pg_timeout),
        )
        # A worker may end at once; nobody is to be still connecting then.
        store.set(f"connected{job.rank}", "")
        store.wait([f"connected{rank}" for rank in range(job.world_size)])
        worker = getattr(job.worker, "on_rank", job.worker)
        value = worker(job.rank, job.world_size, *job.args)
        if dist.is_initialized():  # not after an error: the process ends anyway
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
        return value
