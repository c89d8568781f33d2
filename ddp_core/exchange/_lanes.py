"""Runs one ordered queue and one process group per round, for Gloo and other host backends.

On Gloo, callbacks of different buckets fire in different orders on different ranks. A collective
issued from the callback that fires first therefore meets another bucket's collective on the other
rank. Here the n-th collective of every bucket goes through lane n, in ticket order: bucket i issues
its n-th collective after bucket i-1 issued its n-th, or skipped it. Each lane has a group of
its own, so lanes need no order among each other.

Lane 0 is the caller's group: first collectives are issued inside the hook call, in the order in
which the reducer launches buckets, as DistributedDataParallel itself would. Later rounds are
resumed by one driver thread per ``Lanes``; Gloo's threads only post to its queue.

Collectives are issued outside of the lock: with TORCH_DISTRIBUTED_DEBUG=DETAIL the caller's group
returns from one only when all ranks have issued it. No thread waits for another lane meanwhile.
"""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.exchange._collectives import Collective
from ddp_core.exchange._lane_groups import LaneGroup, acquire_lane_groups
from ddp_core.exchange._task import Task, clock

__all__ = ["Lanes"]

# The ticket whose collective is done, and how it failed. A ticket alone: its collective has been
# issued, and it has work meanwhile. An event: discard everything, then set the event.
_Event = tuple[int, Exception | None] | int | threading.Event
_Completion = torch.futures.Future[None]
_JOIN_TIMEOUT = 5.0  # seconds for the driver thread to process an event


@dataclass(eq=False)
class _Lane:
    group: dist.ProcessGroup
    lane_group: LaneGroup | None = None  # of all lanes but the first
    next_ticket: int = 0  # the ticket that issues next
    issuing: bool = False  # a thread issues, and continues with all that is ready
    waiting: dict[int, Task] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)


def _drive(lanes: weakref.ReferenceType[Lanes], events: queue.SimpleQueue[_Event | None]) -> None:
    """Resumes exchanges on the driver thread until it is stopped; holds no reference to the lanes.

    Exchanges under way are completed then, since other ranks take part in them. After a discard
    they fail, since other ranks may be gone.
    """
    stops = False
    while True:
        event = events.get()
        alive, completion = lanes(), None
        if isinstance(event, threading.Event):
            if alive is not None:
                _discard(alive, event, events)
            return
        if event is None:
            stops = True
        elif isinstance(event, int):
            if alive is not None:
                alive._run_overlap(event)
        elif alive is not None:
            completion = alive._resume(*event)
        done = stops and (alive is None or not alive._under_way)
        # Before the caller continues: it may drop the lanes, and expects them gone then.
        del alive, event
        if completion is not None:
            completion.set_result(None)
        if done:
            return


def _discard(
    lanes: Lanes, discarded: threading.Event, events: queue.SimpleQueue[_Event | None]
) -> None:
    """Fails exchanges under way, and drops the groups once their last collectives have ended."""
    lane_groups, pending = list(lanes._lane_groups), lanes._fail_all()
    lanes._lane_groups.clear()
    discarded.set()
    # Whoever drops a group with a collective under way waits for it, until the timeout if another
    # rank is silent. So this thread keeps the lanes, and with them the groups, until then.
    while pending:
        pending -= isinstance(events.get(), tuple)  # and not a ticket with work
    for lane_group in lane_groups:
        lane_group.discard()


def _shut_down(
    events: queue.SimpleQueue[_Event | None],
    threads: list[threading.Thread],
    lane_groups: list[LaneGroup],
) -> None:
    events.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=_JOIN_TIMEOUT)
            if thread.is_alive():  # it may yet issue something
                for lane_group in lane_groups:
                    lane_group.unusable = True
    while lane_groups:
        lane_groups.pop().release()


class Lanes:
    """Drives exchanges over ``rounds`` lanes.

    Making lanes beyond the first is itself a collective: all ranks of ``group`` call it together.

    Args:
        group: the group of lane 0, which gives all lanes their ranks and timeout.
        rounds: collectives per bucket, at most.
    """

    def __init__(self, group: dist.ProcessGroup, rounds: int = 1) -> None:
        self._lanes = [_Lane(group)]
        self._tickets = 0
        self._under_way: dict[int, Task] = {}  # by ticket
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lane_groups: list[LaneGroup] = []
        # Also runs at interpreter exit, before Gloo's threads lose the interpreter.
        self._finalizer = weakref.finalize(
            self, _shut_down, self._events, self._threads, self._lane_groups
        )
        self.ensure(rounds)

    @property
    def rounds(self) -> int:
        """Returns the number of lanes."""
        return len(self._lanes)

    def ensure(self, rounds: int) -> None:
        """Adds lanes until there are ``rounds``; no exchange may be under way."""
        missing = rounds - len(self._lanes)
        if missing <= 0:  # a group that torch.distributed does not know has one lane all the same
            return
        lane_groups = acquire_lane_groups(self._lanes[0].group, missing)
        self._lane_groups += lane_groups
        self._lanes += [
            _Lane(lane_group.group, lane_group, next_ticket=self._tickets)
            for lane_group in lane_groups
        ]

    def run(self, task: Task) -> torch.futures.Future[Tensor]:
        """Starts ``task`` and returns the future of its result; encodes in the calling thread."""
        if not self._finalizer.alive:
            raise RuntimeError("Lanes.run: the lanes are closed; register the hook again")
        if not self._threads:
            thread = threading.Thread(
                target=_drive,
                args=(weakref.ref(self), self._events),
                name="commhooks-lanes",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)
        # `then` turns an exception into the future's error; set_exception would hand C++ a value.
        future = task.completion.then(task.outcome)
        task.ticket = self._tickets
        self._tickets += 1
        self._under_way[task.ticket] = task
        if (completion := self._submit_next(task, task.advance())) is not None:
            completion.set_result(None)
        return future

    def run_here(self, task: Task) -> torch.futures.Future[Tensor]:
        """Runs ``task`` to its end in the calling thread, over lane 0 alone; see ``run``.

        This is for callers that wait for the future at once: no other thread has to wake up.
        """
        group = self._lanes[0].group
        error: Exception | None = None
        while (request := task.advance(error)) is not None:
            row = task.rows[-1]
            row.issued = clock()
            try:
                work = request.issue(group)
                request.run_overlap()
                work.wait()
                error = None
            except Exception as failure:
                error = task.failed(failure)
            row.done = clock()
        task.completion.set_result(None)
        return task.completion.then(task.outcome)

    def close(self) -> None:
        """Stops the driver thread and releases the groups of further lanes. Safe to call twice."""
        self._finalizer()

    def abort(self) -> None:
        """Closes the lanes without waiting for other ranks, which may be gone.

        Exchanges under way fail; groups of further lanes are dropped when their last collectives
        have failed. To be called by the thread that runs exchanges, between two of them.
        """
        if self._finalizer.detach() is None:
            return
        discarded = threading.Event()
        if self._threads:
            self._events.put(discarded)
            # For decoding, and work beside collectives, at most; only with
            # TORCH_DISTRIBUTED_DEBUG=DETAIL does that thread wait for other ranks, and it then
            # drops the groups by itself, later.
            if not discarded.wait(_JOIN_TIMEOUT):
                return
        while self._lane_groups:
            self._lane_groups.pop().discard()

    def _fail_all(self) -> int:
        """Fails all exchanges under way; returns how many collectives have yet to end."""
        tasks = list(self._under_way.values())
        self._under_way.clear()
        waiting = sum(len(lane.waiting) for lane in self._lanes)
        for task in tasks:
            task.abort()
        return len(tasks) - waiting

    def _run_overlap(self, ticket: int) -> None:
        """Does the work that an exchange has while its collective is under way."""
        request = self._under_way[ticket].request
        assert request is not None
        request.run_overlap()

    def _resume(self, ticket: int, error: Exception | None) -> _Completion | None:
        """Resumes an exchange whose collective is done; see ``_submit_next``."""
        task = self._under_way[ticket]
        lane_group = self._lanes[task.round].lane_group
        if lane_group is not None:
            lane_group.completed += 1
            lane_group.unusable |= error is not None
        return self._submit_next(task, task.advance(None if error is None else task.failed(error)))

    def _submit_next(self, task: Task, request: Collective | None) -> _Completion | None:
        """Queues the next collective of ``task`` in its lane.

        Returns the completion of the task if there is no further collective.
        """
        if request is not None:
            lane = self._lanes[task.round]
            with self._lock:
                lane.waiting[task.ticket] = task
            self._issue_ready(lane)
            return None
        # Also after an error: later buckets must not wait for this one.
        for lane in self._lanes[len(task.rows) :]:
            with self._lock:
                lane.skipped.add(task.ticket)
            self._issue_ready(lane)
        del self._under_way[task.ticket]
        return task.completion

    def _issue_ready(self, lane: _Lane) -> None:
        """Issues, in ticket order, all collectives of ``lane`` whose turn has come."""
        while (task := self._next(lane)) is not None:
            self._issue(lane, task)
            with self._lock:
                lane.issuing = False
                lane.next_ticket += 1

    def _next(self, lane: _Lane) -> Task | None:
        """Returns the task whose turn it is, or None; the caller alone must issue it."""
        with self._lock:
            if lane.issuing:
                return None
            while lane.next_ticket in lane.skipped:
                lane.skipped.remove(lane.next_ticket)
                lane.next_ticket += 1
            task = lane.waiting.pop(lane.next_ticket, None)
            lane.issuing = task is not None
            return task

    def _issue(self, lane: _Lane, task: Task) -> None:
        """Starts the pending collective of ``task``; its completion becomes an event."""
        assert task.request is not None
        row, ticket, events = task.rows[-1], task.ticket, self._events
        if lane.lane_group is not None:
            lane.lane_group.issued += 1
        row.issued = clock()
        try:
            future = task.request.issue(lane.group).get_future()
        except Exception as error:
            events.put((ticket, error))
            return
        if task.request.overlap is not None:
            events.put(ticket)  # the work comes before the collective's own event

        # Runs on a thread of the group, which must not be left with the last reference to it: a
        # group that is destroyed there waits for itself ("Resource deadlock avoided", abort). So
        # neither the lanes nor the task, which lead to the group, are in the closure.
        def done(future: torch.futures.Future[Any]) -> None:
            row.done = clock()
            failure = None
            try:
                future.value()
            except Exception as error:
                failure = error
            events.put((ticket, failure))

        future.add_done_callback(done)
