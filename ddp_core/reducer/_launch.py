"""Launches a full bucket, through the hook or a plain all-reduce, and waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core._torch import AnyFuture, profiler_runs
from ddp_core.exchange._clocks import event_after, is_capturing, set_time
from ddp_core.exchange._collectives import AllReduce, SparseSum
from ddp_core.exchange._errors import CollectiveError, PeerError
from ddp_core.exchange._shared_store import group_timeout
from ddp_core.exchange._task import RoundRecord
from ddp_core.reducer._autograd import NO_BACKWARD
from ddp_core.reducer._buckets import BucketBase, as_numbers
from ddp_core.reducer._failures import (
    DeviceWatchdog,
    FailureBoard,
    FutureNotDone,
    WaitPoint,
    failed,
    never_completed,
    wait_for_future,
    wait_for_work,
)
from ddp_core.reducer._plan import BucketCaps
from ddp_core.reducer._timeline import BucketTimes, StepTimes

__all__ = [
    "CommHook",
    "Launcher",
    "Outcome",
    "ReducerSettings",
    "Step",
    "StepEvents",
    "name_of",
    "named_range",
]


CommHook = Callable[[Any, Any], Any]  # (state, bucket) -> Future[Tensor]


class Outcome:
    """Holds what a launched bucket waits for: a work handle, a hook's future, or nothing.

    Args:
        device: of the bucket.
    """

    __slots__ = ("_happened", "device", "future", "work")

    def __init__(self, device: torch.device, *, work: Any = None, future: Any = None) -> None:
        self.device, self.work, self.future = device, work, future
        self._happened: Callable[[], bool] | None = None

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was launched."""
        return self.work is None and self.future is None

    def is_done(self) -> bool:
        """Whether waiting would return at once."""
        if self.device.type != "cpu" and is_capturing(torch.get_device_module(self.device.type)):
            return False
        if self.future is not None:
            if not self.future.done() or self.device.type == "cpu":
                return bool(self.future.done())
            # On a GPU the future is complete when its work is enqueued: the caller's stream would
            # wait for it, and backward with it.
            if self._happened is None:
                self._happened = event_after(self.future, self.device)
            return self._happened()
        return self.work is None or self.work.is_completed()


class Launcher:
    """Starts and ends the exchange of buckets; errors name step and bucket.

    Args:
        group: ranks to average over.
        name: of the reducer, the same on all ranks.
        device: of the buckets.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, device: torch.device) -> None:
        self.group = group
        self.hook: tuple[CommHook, Any] | None = None
        self.events = StepEvents()  # notifies the hook's state
        self.hook_owns_gradients = False  # the hook's state keeps what was averaged
        self.hook_name: str | None = None
        self.step = 0  # synchronised backward passes
        self.backward_count = 0  # the same, counting those that raised
        self.error = ""  # the latest one's words
        self._peer_failed = False  # by another rank, in this step, that it has failed
        self._board = FailureBoard(group, name)
        self.abort_agreement = self._board.abort_agreement
        self._device = device
        self._side: Any = None  # the stream of messages, made when it is needed first
        # If waiting does not block the host, a thread polls the board.
        self._watchdog = (
            None if device.type == "cpu" else DeviceWatchdog(group, device, self._board)
        )
        self._thread = 0  # that of the training loop

    def set_hook(self, hook: tuple[CommHook, Any] | None) -> None:
        """Sets the hook that exchanges buckets from now on; None stands for a plain all-reduce."""
        self.hook = hook
        self.hook_name = None if hook is None else name_of(hook[0])
        self.events = StepEvents(None if hook is None else hook[1])
        self.hook_owns_gradients = hook is not None and getattr(hook[1], "owns_gradients", False)

    def notifies(self, state: object) -> bool:
        """Whether this state is notified of the end of each step."""
        return self.hook is not None and self.hook[1] is state

    def step_begins(self) -> None:
        """Begins a step after its forward pass, on the thread of the training loop."""
        self.backward_count += 1
        self._thread, self._peer_failed = threading.get_ident(), False
        if self._watchdog is not None:
            self._watchdog.check()

    def record_enqueued(self) -> None:
        """Records that the current stream (on a GPU), or the host, has waited for all buckets."""
        if self._watchdog is not None:
            self._watchdog.record_enqueued()

    def step_aborted(self, launched: int | None) -> None:
        """Aborts the step; ``launched`` counts its launched buckets, if its backward began."""
        self._clear_watchdog()
        if launched is not None:
            self.abort_agreement.record(self.step, launched, from_peer=self._peer_failed)
        self.events.step_aborted()

    def _clear_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.forget()

    def _place(self, bucket: int = -1) -> WaitPoint:
        return WaitPoint(self.backward_count, self.step, bucket)

    def launch(self, bucket: BucketBase, *, is_last: bool, times: BucketTimes | None) -> Outcome:
        """Starts the exchange of a full bucket."""
        if times is not None:
            times.mark("launched")
        try:
            if self._watchdog is not None:
                self._watchdog.record_launch(self._place(bucket.number), self._thread)
            with named_range("launch", bucket.number):
                if self.hook is None:
                    return self._all_reduce(bucket, times)
                return self._run_hook(bucket, is_last, times)
        except Exception as error:
            self._report(bucket, error)
            raise

    def _all_reduce(self, bucket: BucketBase, times: BucketTimes | None) -> Outcome:
        try:
            # A group that rounds (commhooks.process_group) does not round complex numbers.
            numbers = as_numbers(bucket.buffer, bucket.parameters[0])
            work: Any = AllReduce(numbers, "sum").issue(self.group)
        except RuntimeError as error:
            raise failed(error, "all_reduce", self.step, bucket.number) from error
        if times is not None:
            _record(work, bucket, self.step, times)
        return Outcome(bucket.buffer.device, work=work)

    def _run_hook(self, bucket: BucketBase, is_last: bool, times: BucketTimes | None) -> Outcome:
        assert self.hook is not None
        hook, state = self.hook
        handed = bucket.as_grad_bucket(is_last=is_last)
        if times is not None:
            handed.note = times.rounds.append
        future = hook(state, handed)
        # The futures of collectives are of the C++ class, Python's is one of its subclasses.
        if not isinstance(future, AnyFuture):
            raise TypeError(
                f"the communication hook {name_of(hook)} returns a "
                f"torch.futures.Future[Tensor], got {type(future).__name__}"
            )
        if times is not None:
            _when_done(future, bucket.buffer.device, _stamp(times, None))
        return Outcome(bucket.buffer.device, future=future)

    def finish(self, bucket: BucketBase, outcome: Outcome, times: BucketTimes | None) -> Tensor:
        """Waits for a bucket's exchange and returns its flat averaged gradient.

        Raises:
            CollectiveError: the exchange failed, here or on another rank; names the round.
        """
        if times is not None:
            times.mark("wait_began")
        place = self._place(bucket.number)
        try:
            if self._watchdog is not None:
                self._watchdog.check()
            result = bucket.buffer
            with named_range("wait", bucket.number):
                if outcome.future is not None:
                    result = wait_for_future(outcome.future, self._board, place)
                elif outcome.work is not None:
                    wait_for_work(outcome.work, bucket.buffer.device, self._board, place)
        except Exception as error:
            report = self._board.poll(place)
            self._report(bucket, error)
            raise failed(error, "the exchange", self.step, bucket.number, report) from error
        if times is not None:
            times.mark("wait_ended")
        return result

    def await_work(self, work: dist.Work, device: torch.device, *, after: int = -1) -> None:
        """Waits for another collective of the step, issued after bucket ``after``."""
        wait_for_work(work, device, self._board, self._place(after))

    def message_stream(self) -> AbstractContextManager[object]:
        """Returns a stream on which to wait for messages that are read while a GPU computes."""
        if self._device.type == "cpu":
            return nullcontext()
        module = torch.get_device_module(self._device.type)
        if self._side is None:
            self._side = module.Stream(self._device)
        beside: AbstractContextManager[object] = module.stream(self._side)
        return beside

    def await_message(self, work: dist.Work, device: torch.device, operation: str) -> None:
        """Waits for a small message of the step; an error names it.

        Raises:
            CollectiveError: the message failed.
        """
        try:
            self.await_work(work, device)
        except RuntimeError as error:
            raise failed(error, operation, self.step, 0) from error

    def await_futures(self, futures: list[Any]) -> None:
        """Waits for futures of the buffer hook."""
        for future in futures:
            wait_for_future(future, self._board, self._place(), of_tensor=False)

    def settle(self, bucket: BucketBase, outcome: Outcome) -> None:
        """Waits until the exchange of an aborted step writes no more.

        Raises:
            RuntimeError: a hook keeps its future open for longer than collectives may take.
        """
        if outcome.future is not None:
            self._settle_future(outcome.future, f"for bucket {bucket.number}", bucket.number)
            return
        with contextlib.suppress(CollectiveError):  # the step has raised already
            self.finish(bucket, outcome, None)

    def settle_futures(self, futures: list[Any]) -> None:
        """Waits until the buffer hook's futures of an aborted step are completed."""
        for future in futures:
            self._settle_future(future, "for buffers")

    def _settle_future(self, future: Any, purpose: str, bucket: int = -1) -> None:
        limit, place = group_timeout(self.group), self._place(bucket)
        try:
            wait_for_future(future, self._board, place, of_tensor=False, limit=limit)
        except FutureNotDone:
            raise never_completed(purpose, limit) from None
        except Exception:  # the step has raised already
            return

    def _report(self, bucket: BucketBase, error: Exception) -> None:
        """Reports this rank's failure to the others; a failure received from a peer is not."""
        self._clear_watchdog()
        self._peer_failed |= isinstance(error, PeerError)
        if not isinstance(error, PeerError):
            self.report(f"bucket {bucket.number}: {type(error).__name__}: {error}")

    def report(self, text: str) -> None:
        """Reports to the other ranks, and to the logging data, that this rank will not continue."""
        self._clear_watchdog()
        self.error = text
        self._board.post(self.backward_count, f"step {self.step}, {text}")


def name_of(hook: Any) -> str:
    """Returns the name of a hook."""
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name


def _when_done(future: Any, device: torch.device, call: Callable[[object], None]) -> None:
    """Calls a function when a future is completed, on a stream that waits for its work."""
    if device.type == "cpu":
        future.add_done_callback(call)
    else:
        future.then(call)  # the other way promises no stream


def _record(work: Any, bucket: BucketBase, step: int, times: BucketTimes) -> None:
    """Records the all-reduce of a bucket."""
    nbytes, device = bucket.nbytes, bucket.buffer.device
    record = RoundRecord(step, bucket.number, 0, "all_reduce", nbytes, nbytes, 0.0)
    set_time(record, "issued", times.clock.now())
    times.rounds.append(record)
    # A sparse sum is written when it is waited for: on a GPU there is no earlier end of it.
    if not (isinstance(work, SparseSum) and device.type != "cpu"):
        _when_done(work.get_future(), device, _stamp(times, record))


def _stamp(times: BucketTimes, record: RoundRecord | None) -> Callable[[object], None]:
    def stamp(_: object) -> None:
        now = times.clock.now()
        set_time(times, "decoded", now)
        ends = record
        if ends is None and not times.rounds:  # a hook that does not report its rounds
            nbytes = times.nbytes
            ends = RoundRecord(0, times.bucket, 0, "hook", nbytes, nbytes, 0.0)
            set_time(ends, "issued", times.moments.get("launched", times.launched))
            times.rounds.append(ends)
        if ends is not None:
            set_time(ends, "done", now)
            set_time(ends, "finished", now)

    return stamp


_NOTHING = nullcontext()


def named_range(name: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """Returns a range of the profiler, if one runs.

    Args:
        bucket: number of the bucket, if the range belongs to one.
    """
    # Asked at every call: `record_function` itself takes microseconds without a profiler, too.
    if not profiler_runs():
        return _NOTHING
    title = name if bucket is None else f"{name}: bucket {bucket}"
    return torch.autograd.profiler.record_function(f"DistributedDataParallel.{title}")


# ---- settings, and the facts of a step


@dataclass
class ReducerSettings:
    """Holds the settings of a reducer; see the arguments of DistributedDataParallel."""

    caps: BucketCaps
    find_unused: bool = False
    static_graph: bool = False
    as_view: bool = False
    skip_unused: bool = False
    dtype: torch.dtype | None = None  # of the buckets; the parameters' own by default


@dataclass(slots=True)
class Step:
    """Holds the state of one synchronised step; the next step has a new one."""

    expecting: bool = False  # gradients are to be reduced
    is_open: bool = False  # a backward pass is under way, or has raised
    fast_path: bool = False  # an arrival only marks its parameter ready
    forward_in_pass: int = NO_BACKWARD  # in which its forward ran (activation checkpointing)
    recomputed_in: int = NO_BACKWARD  # the pass in which its forward ran once more
    was_nested: bool = False  # it ended with a reentrant pass within another
    complete: bool = True  # all gradients were reduced, or none is to be
    ready: list[int] = field(default_factory=list)  # parameters that count as arrived, in order
    unused: list[int] = field(default_factory=list)  # those that backward does not come to
    unused_marked: bool = False
    unused_known: bool = True  # the ranks have exchanged it where it is needed
    used: bytearray = field(default_factory=bytearray)  # here, by parameter, once it has landed
    hook_calls_left: list[int] = field(default_factory=list)  # of the hooks (static graph), to come
    hook_call_order: list[int] = field(
        default_factory=list
    )  # parameters by call, where a graph is learned
    needed_buckets: list[bool] | None = None  # buckets that a rank needs; None: all are sent
    scale: float | None = None  # of gradients that go into a bucket; None: the hook scales
    divisor: int = 0  # not known yet
    launched: int = 0  # buckets
    finished: int = 0  # buckets
    outcomes: list[Outcome] = field(default_factory=list)
    unwritten: list[nn.Parameter] = field(default_factory=list)  # no rank uses them
    abort_reported: bool = False  # the hook's state was notified
    times: StepTimes | None = None


# ---- events for the state of a hook


class StepEvents:
    """Calls the methods that a hook's state has; they are looked up when the hook is set.

    Of every synchronised step that has begun, a state gets exactly one end: ``gradients_written``
    or ``step_aborted``. See ``DistributedDataParallel.register_comm_hook`` for what each means.
    """

    def __init__(self, state: Any = None) -> None:
        # Looked up once: every step asks for them, and most states have none.
        self._backward_finished: Callable[[], object] | None = _method(state, "backward_finished")
        self._gradients_written: Callable[[Sequence[nn.Parameter]], object] | None
        self._gradients_written = _method(state, "gradients_written")
        self._step_aborted: Callable[[], object] | None = _method(state, "step_aborted")
        self._compare_ranks: Callable[[], object] | None = _method(state, "compare_ranks")

    def compare_ranks(self) -> None:
        """Lets the state compare the ranks, before the first collective of a forward pass."""
        if self._compare_ranks is not None:
            self._compare_ranks()

    @property
    def wants_unused(self) -> bool:
        """Whether the state is notified of parameters whose gradients were not written."""
        return self._gradients_written is not None

    def backward_finished(self) -> None:
        """Notifies the state that backward has succeeded: all buckets were launched."""
        if self._backward_finished is not None:
            self._backward_finished()

    def gradients_written(self, unused: Sequence[nn.Parameter]) -> None:
        """Notifies the state that all gradients were written, except those of ``unused``."""
        if self._gradients_written is not None:
            self._gradients_written(unused)

    def step_aborted(self) -> None:
        """Notifies the state that the step's results will not be used."""
        if self._step_aborted is not None:
            self._step_aborted()


def _method(state: Any, name: str) -> Any:
    method = getattr(state, name, None)
    return method if callable(method) else None
