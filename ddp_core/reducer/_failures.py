"""Reports failures between ranks, and polls for such reports in every wait."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.exchange._devices import Marks
from ddp_core.exchange._errors import CollectiveError, MismatchError, PeerError, ranks_in_words
from ddp_core.exchange._lane_groups import backend_for
from ddp_core.exchange._shared_store import (
    SharedStore,
    StoreBarrier,
    get_text,
    group_timeout_s,
    set_once,
    shared_store,
)

__all__ = [
    "POLL_INTERVAL",
    "AbortAgreement",
    "DeviceWatchdog",
    "FailureBoard",
    "FutureNotDone",
    "WaitPoint",
    "failed",
    "never_completed",
    "peer_error",
    "rebuild_failed",
    "wait_for_future",
    "wait_for_work",
]


# Waits poll the board at this interval; most are over before the first poll.
POLL_INTERVAL = timedelta(seconds=1)
_POLL_SECONDS = POLL_INTERVAL.total_seconds()


class WaitPoint(NamedTuple):
    """Describes the bucket or message that a rank waits for."""

    backward_count: int  # steps, counting those that raised
    step: int
    bucket: int  # -1: a message of the step


class FailureBoard:
    """Reports failed ranks to the others through the process group's store.

    Args:
        group: ranks that share the board.
        name: distinguishes boards of one group; the same on all ranks.

    Attributes:
        abort_agreement: steps that ranks have aborted, see :class:`AbortAgreement`.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._rank = group.rank()
        self._name = name
        self._reported = -1  # the attempt of the last report
        self._store = shared_store(group)  # without one, failures time out instead
        self.abort_agreement = AbortAgreement(group, self._store, name)

    def post(self, backward_count: int, text: str) -> None:
        """Posts this rank's failure; never raises. The first report of a backward pass counts."""
        if self._store is not None and backward_count != self._reported:
            self._reported = backward_count
            set_report = set_once(self._key(backward_count), f"rank {self._rank}: {text}")
            # The process may end at once, so it waits until the others can read it.
            self._store.call_soon(set_report, _POLL_SECONDS)

    def poll(self, place: WaitPoint) -> str | None:
        """Returns the report of another rank that will not reach this wait point, or None.

        A store that does not answer is not waited for: the wait itself has a timeout.
        """
        if self._store is None:
            return None
        text = self._store.try_call(get_text(self._key(place.backward_count)), _POLL_SECONDS)
        if not text or text.startswith(f"rank {self._rank}:"):
            return self.abort_agreement.poll(place.step, place.bucket)
        return text

    def check(self, place: WaitPoint) -> None:
        """Raises if another rank has reported that it will not reach this wait point.

        Raises:
            PeerError: with the other rank's message.
        """
        text = self.poll(place)
        if text is not None:
            raise peer_error(text)

    def _key(self, backward_count: int) -> str:
        return f"ddp_core/{self._name}/{backward_count}"


def peer_error(text: str) -> PeerError:
    """Returns the error of a rank that waits for a failed one, with that rank's report."""
    return PeerError(
        f"another rank failed in this step, so its gradients will not come: {text}. The process "
        f"group has collectives that no rank answers; end the process and resume from the last "
        f"checkpoint"
    )


def wait_for_work(
    work: dist.Work, device: torch.device, board: FailureBoard, place: WaitPoint
) -> None:
    """Waits for a collective, and polls for failures of other ranks meanwhile.

    On CUDA waiting orders streams and returns at once; :class:`DeviceWatchdog` polls the board.
    """
    if device.type != "cpu":
        work.wait()
        return
    while True:
        try:
            work.wait(POLL_INTERVAL)
            return
        except RuntimeError:
            if work.is_completed():  # it failed; otherwise the slice is over
                raise
        board.check(place)


class FutureNotDone(Exception):
    """Raised when a future was not complete in time."""


def wait_for_future(
    future: Any,
    board: FailureBoard,
    place: WaitPoint,
    *,
    of_tensor: bool = True,
    limit: timedelta | None = None,
) -> Tensor:
    """Returns the tensor of a hook's future, and polls for failures while waiting.

    Raises:
        FutureNotDone: the future is not completed within ``limit``.
    """
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        end = None if limit is None else time.monotonic() + limit.total_seconds()
        while not done.wait(POLL_INTERVAL.total_seconds()):
            board.check(place)
            if end is not None and time.monotonic() > end:
                raise FutureNotDone
    value = future.wait()
    if isinstance(value, (list, tuple)) and len(value) == 1:  # what a collective's future holds
        value = value[0]
    if of_tensor and not isinstance(value, Tensor):
        raise TypeError(
            f"a communication hook returns a future of one tensor, its future holds a "
            f"{type(value).__name__}"
        )
    tensor: Tensor = value
    return tensor


def failed(
    error: BaseException, operation: str, step: int, bucket: int, report: str | None = None
) -> CollectiveError:
    """Returns the error for a failed wait, with step, bucket and round.

    Args:
        report: what another rank has reported, which may be the cause.
    """
    place = f"step {step}, bucket {bucket}, "
    round = 0 if place not in str(error) else _round_in(str(error))
    reported = "" if report is None or isinstance(error, PeerError) else f". Reported by {report}"
    failure = CollectiveError(
        f"{operation} failed in step {step}, bucket {bucket}, round {round}: {error}{reported}",
        step=step,
        bucket=bucket,
        round=round,
    )
    failure.__cause__ = error
    return failure


def never_completed(purpose: str, limit: timedelta | None) -> RuntimeError:
    """Returns the error for a hook that never completes the future of an aborted step."""
    return RuntimeError(
        f"a step was aborted, and the future that the hook returned {purpose} was not completed "
        f"within {limit}, the process group's timeout. A hook that holds buckets back lets them go "
        f"in a method step_aborted() of its state, see register_comm_hook"
    )


def rebuild_failed(error: BaseException, step: int) -> CollectiveError:
    """Returns the error for ranks that could not agree on buckets."""
    return CollectiveError(
        f"agreeing on new buckets failed before step {step}: {error}. A peer died, or the ranks do "
        f"not run the same code",
        step=step,
        bucket=0,
        round=0,
    )


def _round_in(text: str) -> int:
    """Returns the round that the runner wrote into a message; torch's futures keep its text."""
    digits = text.partition("round ")[2]
    return int(digits[: len(digits) - len(digits.lstrip("0123456789"))] or 0)


# ---- steps that raised


_SAME = "all ranks alike"
_SOON = 1.0  # seconds in which a store answers


class _AbortedStep(NamedTuple):
    """Describes how far a rank got in a step that it has aborted."""

    step: int  # since the ranks are together
    launched: int  # buckets
    from_peer: bool  # by another rank, that it has failed


class AbortAgreement:
    """Lets ranks agree, after a failed backward pass, on which step was aborted.

    The agreement uses the store and no collective, since the ranks that did not raise are in
    another collective. Each rank numbers its aborted steps; ranks that abort the same steps have
    the same numbers, and leave the keys of two of them in the store.

    Args:
        group: the ranks.
        store: the store of the group, if it has one.
        name: distinguishes reducers of one group; the same on all ranks.

    Attributes:
        first_step: the step with which these ranks began; a rank that joined them counts from 0.
    """

    def __init__(self, group: dist.ProcessGroup, store: SharedStore | None, name: str) -> None:
        self._group, self._store, self._name = group, store, name
        self._rank, self._size = group.rank(), group.size()
        self.first_step = 0
        self._number = 0  # of the dropped step that comes next, or is not agreed on yet
        self._aborted: _AbortedStep | None = None
        self._error = ""  # the ranks did not drop the same: for good

    def record(self, step: int, launched: int, *, from_peer: bool) -> None:
        """Records an aborted step locally; no message is sent.

        Args:
            launched: number of buckets whose exchange has begun.
            from_peer: whether the step raised because another rank had failed.
        """
        if self._size > 1:
            self._aborted = _AbortedStep(step - self.first_step, launched, from_peer)

    def agree(self) -> None:
        """Waits until all ranks have aborted the step that this rank has, if it has any.

        Ranks call it before their next collective.

        Raises:
            MismatchError: a rank has not aborted the step, or after another number of buckets.
        """
        if self._aborted is None:
            return
        if not self._error:
            try:
                outcome = self._outcome(self._aborted)
            except RuntimeError as error:
                outcome = f"{self._text(self._aborted)}, and {error}"
            if outcome == _SAME:
                if before := self._point(self._number - 1):  # all have passed it
                    before.delete_keys()
                self._number, self._aborted = self._number + 1, None
                return
            self._error = outcome
        raise MismatchError(
            f"DistributedDataParallel: a backward pass raised, and not at the same place on all "
            f"ranks: {self._error}. Gradients of different layers or steps would be averaged. End "
            f"all processes and resume from the last checkpoint; to go on after an error in "
            f"backward, let all ranks raise and catch it at the same place"
        )

    def poll(self, step: int, bucket: int) -> str | None:
        """Returns a message if another rank has aborted the step that this rank waits in.

        Args:
            step, bucket: what this rank waits for.
        """
        point = self._point(self._number)
        if point is None or self._size == 1:
            return None
        # This rank's collective has a timeout of its own, so a silent store is not waited for.
        first = point.store.try_call(get_text(point.key), _SOON)
        if first is None:
            return None
        outcome = point.store.try_call(get_text(f"{point.key}/outcome"), _SOON)
        (reporter, aborted), difference = _parse(first), ""
        if outcome is None and self._aborted is not None:
            # Launched buckets are settled here; they complete if all ranks launched as many.
            if aborted != self._aborted:
                difference = self._difference(reporter, aborted, self._aborted)
        elif outcome is None and aborted[:2] <= (step - self.first_step, bucket):
            awaited = f"bucket {bucket} of step {step}" if bucket >= 0 else f"ranks in step {step}"
            difference = f"{self._text(aborted, reporter)}, rank {self._rank} waits for {awaited}"
        if difference:
            outcome = point.store.try_call(point.set_outcome(difference), _SOON)
        if outcome is None or outcome == _SAME:
            return None
        self._error = outcome
        return outcome

    def _outcome(self, dropped: _AbortedStep) -> str:
        """Posts the aborted step; returns the outcome, which the first rank to decide sets."""
        point = self._point(self._number)
        if point is None:
            return f"{self._text(dropped)}, and the group has no store to ask the others"
        limit = group_timeout_s(self._group)
        end = time.monotonic() + limit

        def decide(outcome: str) -> str:
            return point.store.call(point.set_outcome(outcome), end - time.monotonic())

        text = f"{self._rank} {dropped.step} {dropped.launched} {int(dropped.from_peer)}"
        reporter, aborted = _parse(point.store.call(set_once(point.key, text), limit))
        if aborted != dropped:
            return decide(self._difference(reporter, aborted, dropped))
        outcome = point.wait_for_all(_SAME, end)
        if outcome is not None:
            return outcome
        came, missing = point.arrived_ranks()
        missed = f"{ranks_in_words(missing)} did not within {limit:g} s"
        return decide(f"{self._text(dropped, *came)}, {missed}")

    def _difference(self, reporter: int, aborted: _AbortedStep, dropped: _AbortedStep) -> str:
        return f"{self._text(aborted, reporter)}, {self._text(dropped)}"

    def _text(self, dropped: _AbortedStep, *who: int) -> str:
        """Describes the step that ranks have aborted; this rank by default."""
        how = "learned of another rank's failure in" if dropped.from_peer else "aborted"
        step, buckets = dropped.step + self.first_step, dropped.launched
        return f"{ranks_in_words(who or [self._rank])} {how} step {step} after {buckets} buckets"

    def _point(self, number: int) -> StoreBarrier | None:
        """Returns the barrier of one aborted step; its own key holds the first rank's record."""
        if self._store is None:
            return None
        key = f"ddp_core/{self._name}/aborted/{number}"
        return StoreBarrier(self._store, key, self._rank, self._size)


def _parse(value: str) -> tuple[int, _AbortedStep]:
    rank, step, launched, from_peer = map(int, value.split())
    return rank, _AbortedStep(step, launched, bool(from_peer))


# ---- waiting on a GPU


@dataclass(eq=False)
class _Pending:
    """Holds a step with exchanges that the device may not have done."""

    place: WaitPoint  # the bucket that was enqueued last
    thread: int  # that of the training loop
    mark: int = sys.maxsize  # number of the mark behind its exchanges, once all are enqueued


class DeviceWatchdog:
    """Polls for failures on a thread of its own, while a GPU is at work on exchanges.

    If another rank has failed in this step, the process group is aborted, so that what waits for
    the GPU returns, and an error is raised in the thread of the training loop: the averaged
    gradients are not valid, and no line of the loop may use them.

    Args:
        group: the ranks; aborted where its backend can be (NCCL).
        device: of the buckets.
        board: where ranks report failures.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, board: FailureBoard) -> None:
        self._group, self._device, self._board = group, device, board
        self._marks: Marks | None = None
        self._pending: _Pending | None = None
        self._seen: _Pending | None = None
        self._thread: threading.Thread | None = None
        self._interrupted: int | None = None
        self._error: PeerError | None = None

    def record_launch(self, place: WaitPoint, thread: int) -> None:
        """Records an exchange that is about to be enqueued.

        Args:
            place: the step and the bucket of the exchange.
            thread: the identifier of the training loop's thread.

        Raises:
            PeerError: another rank has failed, and the group is aborted.
        """
        self.check()
        if self._pending is None or self._pending.place.backward_count != place.backward_count:
            self._pending = _Pending(place, thread)
        self._pending.place = place
        if self._thread is None:
            reference = weakref.ref(self)
            self._thread = threading.Thread(
                target=_watchdog, args=(reference,), name="ddp_core-watch", daemon=True
            )
            self._thread.start()

    def record_enqueued(self) -> None:
        """Records that the current stream waits for all exchanges of the step."""
        self.check()
        if self._pending is not None:
            if self._marks is None:
                self._marks = Marks(self._device)
            self._pending.mark = self._marks.enqueue()

    def forget(self) -> None:
        """Drops the pending step, which has raised here: its results will not be used."""
        self._pending = None
        self._cancel_interrupt()

    def check(self) -> None:
        """Raises if another rank has failed, and the group is aborted."""
        if self._error is not None:
            self._cancel_interrupt()  # this error takes the place of one that is still to come
            raise PeerError(str(self._error))

    def _cancel_interrupt(self) -> None:
        thread, self._interrupted = self._interrupted, None
        if thread is not None:
            _raise_in(thread, None)

    def poll(self) -> None:
        """Polls the board if the same step is pending as before."""
        pending, seen = self._pending, self._seen
        self._seen = pending
        if pending is None or pending is not seen or self._error is not None:
            return
        if self._marks is not None and self._marks.latest() >= pending.mark:
            self._pending = None
            return
        text = self._board.poll(pending.place)
        if text is None or self._pending is not pending:
            return
        self._error = peer_error(text)
        self._interrupted = pending.thread
        # Before the abort, after which the loop would continue with gradients that are no averages.
        _raise_in(pending.thread, self._error)
        backend = backend_for(self._group, self._device)
        with contextlib.suppress(Exception):  # a backend that cannot be aborted, or is already
            backend.abort()


def _watchdog(watch: weakref.ref[DeviceWatchdog]) -> None:
    while True:
        time.sleep(POLL_INTERVAL.total_seconds())
        alive = watch()
        if alive is None:
            return
        alive.poll()
        del alive


def _raise_in(thread: int, error: PeerError | None) -> None:
    """Raises an error in another thread, at its next line; None cancels an earlier one."""
    kind: Any = None
    if error is not None:
        # Python makes the exception from a class, without arguments.
        text = str(error)

        def init(self: PeerError) -> None:
            PeerError.__init__(self, text)

        kind = ctypes.py_object(
            type("PeerError", (PeerError,), {"__init__": init, "__module__": PeerError.__module__})
        )
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)
