"""Drives exchanges on backends whose ``wait`` orders streams instead of blocking the caller.

On CUDA with NCCL, and on any device whose work is queued on streams (XPU, NPU), an exchange is only
enqueued inside the hook call: encoding, waiting and decoding, on a side stream, so the backward
pass continues meanwhile. Side streams take turns: while one bucket travels or is decoded, the next
one is encoded.

Collectives of one group run one after the other, in the order of their calls. The second collective
of an exchange waits for what the device computes between the two, so the first collective of the
next exchange comes before it, where the caller allows that. With collectives a and b of exchanges
1, 2 and 3, the order is 1a 2a 1b 3a 2b ..., not 1a 1b 2a 2b.

All ranks launch buckets in the same order, so the order of collectives is the same everywhere. With
a backend that blocks (Gloo on CUDA tensors) the same code is correct and slow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.exchange._clocks import set_time
from ddp_core.exchange._collectives import Collective
from ddp_core.exchange._devices import future_on
from ddp_core.exchange._lanes import Lanes
from ddp_core.exchange._task import Task

__all__ = ["Drivers", "Streams", "stream_module"]


def stream_module(device: str) -> Any:
    """Returns torch's module for a type of device (``torch.cuda``), which has its streams.

    Raises:
        RuntimeError: there is no such module, or it has no streams.
    """
    module: Any = None
    with suppress(RuntimeError, AttributeError):
        module = torch.get_device_module(device)
    missing = [name for name in ("Stream", "current_stream", "stream") if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            f"a communication hook runs on the CPU, or on a device whose work is queued on "
            f"streams: torch.{device} has no {' and no '.join(missing)}, so what a bucket on "
            f"{device!r} holds could be sent before it is computed. Train on another device"
        )
    return module


# One encodes, one waits for the link, and one is paused. A whole exchange is on one stream, rather
# than encoding on one and decoding on the other: an allocator hands out memory per stream, so that
# memory freed by one exchange cannot be overwritten too early.
_SIDE_STREAMS = 3


class _Work(Protocol):
    """Describes what the issue of a collective returns."""

    def wait(self) -> object: ...


class _NotIssued(NamedTuple):
    """Stands for the work of a collective that could not be issued."""

    error: Exception

    def wait(self) -> None:
        raise self.error


@dataclass(eq=False)
class _Started:
    """Holds an exchange whose first collective is issued.

    Attributes:
        task: the exchange.
        future: gets the result.
        stream: makes the exchange's stream current.
        work: the handle of the first collective; None if the exchange is over without any.
    """

    task: Task
    future: torch.futures.Future[Tensor | None]
    stream: AbstractContextManager[None]
    work: _Work | None


class Streams:
    """Drives exchanges on side streams of high priority, in rotation.

    Args:
        group: ranks and backend of all collectives.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._streams: dict[torch.device, list[Any]] = {}
        self._turns: dict[torch.device, Iterator[Any]] = {}
        self._last: dict[torch.device, Any] = {}  # the stream of the latest exchange
        self._paused: _Started | None = None

    def run(
        self, task: Task, device: torch.device, *, may_pause: bool = False
    ) -> torch.futures.Future[Tensor]:
        """Enqueues the exchange and returns the future of its result.

        Args:
            may_pause: leaves what comes after the first collective to the next call of ``run``,
                ``resume`` or ``join``. Until then the future is not done.
        """
        on_host = device.type == "cpu"
        if task.joins:
            self.resume()  # this exchange may read what the paused one writes
        on_side_stream = nullcontext() if on_host else self._side_stream(device, task)
        future: torch.futures.Future[Tensor | None] = future_on(device)
        chained = future.then(task.outcome)
        with on_side_stream:
            work = self._issue(task, task.advance())
        self.resume()
        stream = nullcontext() if on_host else self._last_stream(device)
        started = _Started(task, future, stream, work)
        if may_pause and work is not None:
            self._paused = started
        else:
            self._finish(started)
        if task.joins and not on_host:
            self._follow(device)
        return chained

    def resume(self) -> None:
        """Enqueues the rest of the paused exchange, if there is one."""
        paused, self._paused = self._paused, None
        if paused is not None:
            self._finish(paused)

    def _issue(self, task: Task, request: Collective | None) -> _Work | None:
        """Issues a collective; returns None if the exchange is over."""
        if request is None:
            return None
        set_time(task.rows[-1], "issued", task.clock.now())
        try:
            work = request.issue(self._group)
            request.run_overlap()
        except Exception as error:
            return _NotIssued(error)
        return work

    def _finish(self, started: _Started) -> None:
        """Enqueues what comes after an exchange's first collective, and completes its future."""
        task, work = started.task, started.work
        with started.stream:
            while work is not None:
                error = None
                try:
                    work.wait()
                except Exception as raised:
                    error = task.failed(raised)
                set_time(task.rows[-1], "done", task.clock.now())
                work = self._issue(task, task.advance(error))
            # The tensor and not None: a future makes who waits for it wait for the streams of its
            # value's devices, and only for these.
            started.future.set_result(task.result)

    def join(self) -> None:
        """Makes the caller's streams wait for all exchanges so far."""
        self.resume()
        for device, sides in self._streams.items():
            current = stream_module(device.type).current_stream(device)
            for side in sides:
                current.wait_stream(side)

    def _side_stream(self, device: torch.device, task: Task) -> AbstractContextManager[None]:
        """Makes a side stream current, after all work of the caller's stream so far."""
        module = stream_module(device.type)
        if device not in self._streams:
            # High priority: small kernels would otherwise queue behind those of backward.
            sides = [module.Stream(device=device, priority=-1) for _ in range(_SIDE_STREAMS)]
            self._streams[device], self._turns[device] = sides, itertools.cycle(sides)
        side = self._last[device] = next(self._turns[device])
        side.wait_stream(module.current_stream(device))
        if task.joins:
            for stream in self._streams[device]:
                if stream is not side:
                    side.wait_stream(stream)
        return self._last_stream(device)

    def _last_stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Makes the side stream of the latest exchange current."""
        stream: AbstractContextManager[None] = stream_module(device.type).stream(self._last[device])
        return stream

    def _follow(self, device: torch.device) -> None:
        """Makes all side streams wait for the last exchange, which has released memory.

        At the end of its step the exchange has read tensors of other streams, whose allocator
        reuses their memory.
        """
        last = self._last[device]
        for stream in self._streams[device]:
            if stream is not last:
                stream.wait_stream(last)

    def drop_paused(self) -> None:
        """Issues no second collective of the paused exchange; its future gets an error."""
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.task.abort()
            paused.future.set_result(None)

    def close(self) -> None:
        """Drops the streams, and the paused exchange."""
        self.drop_paused()
        self._streams.clear()
        self._turns.clear()
        self._last.clear()


# ---- the driver of each device


class Drivers:
    """Holds the drivers of one hook, made on first use.

    Args:
        rounds: collectives per bucket, at most; grows by ``ensure``.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._lanes: Lanes | None = None
        self._streams: Streams | None = None

    def ensure(self, rounds: int) -> None:
        """Allows this number of rounds from now on; all ranks call it, between two steps."""
        self._rounds = max(rounds, self._rounds)
        if self._lanes is not None:  # else they are made with this number
            self._lanes.ensure(rounds)

    def check(self, devices: Set[str]) -> None:
        """Raises if exchanges cannot run on one of these types of device.

        Raises:
            RuntimeError: a type is not the host's, and has no streams.
        """
        for device in devices - {"cpu"}:
            stream_module(device)

    def open_lanes(self, group: dist.ProcessGroup) -> Lanes:
        """Makes the lanes and their groups, unless they exist; a collective."""
        if self._lanes is None:
            self._lanes = Lanes(group, self._rounds)
        return self._lanes

    def run(
        self,
        task: Task,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        waits: bool = False,
        may_pause: bool = False,
    ) -> torch.futures.Future[Tensor]:
        """Starts an exchange of a bucket on ``device`` and returns the future of its result.

        Args:
            waits: whether the caller waits for the future before it does anything else.
            may_pause: whether the caller starts other exchanges, or calls ``resume`` or ``join``,
                before it waits for the future.
        """
        if device.type == "cpu":
            lanes = self.open_lanes(group)
            return lanes.run_here(task) if waits else lanes.run(task)
        # One group for all rounds: collectives have one order.
        if self._streams is None:
            self._streams = Streams(group)
        return self._streams.run(task, device, may_pause=may_pause)

    def resume(self) -> None:
        """Starts the rest of an exchange that has paused."""
        if self._streams is not None:
            self._streams.resume()

    def drop_paused(self) -> None:
        """Drops an exchange that has paused; its ranks need not do the same at this moment."""
        if self._streams is not None:
            self._streams.drop_paused()

    def join(self) -> None:
        """Makes the caller's streams wait for all exchanges so far; the host does not wait."""
        if self._streams is not None:
            self._streams.join()

    def abort(self) -> None:
        """Closes without waiting for other ranks; later drivers are made for the new ranks."""
        if self._lanes is not None:
            self._lanes.abort()
        if self._streams is not None:
            self._streams.close()
        self._lanes = self._streams = None

    def close(self) -> None:
        """Stops the lanes' thread and releases further groups. Safe to call twice."""
        if self._lanes is not None:
            self._lanes.close()
        if self._streams is not None:
            self._streams.close()
        self._lanes = self._streams = None
