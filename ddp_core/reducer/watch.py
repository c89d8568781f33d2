"""On a GPU: ends a step that waits for a rank that has failed, as waiting on the host does.

There the host waits for no bucket, so it does not look at the board of failures. The GPU waits, in
a collective that the failed rank will not come to, until the backend's timeout of minutes.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_core.exchange.errors import PeerError
from ddp_core.exchange.lane_groups import backend_for
from ddp_core.reducer.failures import SLICE, FailureBoard, Place, peer_error

__all__ = ["Watch"]


@dataclass(eq=False)
class _Pending:
    """A step with exchanges that the device may not have done."""

    place: Place  # the bucket that was enqueued last
    thread: int  # that of the training loop
    is_over: Callable[[], bool] | None = None  # None: more is to be enqueued


class Watch:
    """Looks at the board, on a thread of its own, while a GPU is at work on exchanges.

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
        self._pending: _Pending | None = None
        self._seen: _Pending | None = None
        self._thread: threading.Thread | None = None
        self._interrupted: int | None = None
        self._error: PeerError | None = None

    def launched(self, place: Place, thread: int) -> None:
        """Hears of an exchange that is about to be enqueued.

        Args:
            place: its step, and the bucket.
            thread: the identifier of the training loop's.

        Raises:
            PeerError: another rank has failed, and the group is aborted.
        """
        self.check()
        if self._pending is None or self._pending.place.attempt != place.attempt:
            self._pending = _Pending(place, thread)
        self._pending.place = place
        if self._thread is None:
            me = weakref.ref(self)
            self._thread = threading.Thread(
                target=_watch, args=(me,), name="ddp_core-watch", daemon=True
            )
            self._thread.start()

    def all_enqueued(self) -> None:
        """Hears that the current stream waits for all exchanges of the step."""
        self.check()
        pending = self._pending
        if pending is not None:
            module = torch.get_device_module(self._device.type)
            event = module.Event()
            event.record(module.current_stream(self._device))
            pending.is_over = event.query

    def forget(self) -> None:
        """Hears that the step has raised here: nobody goes on to use what it computes."""
        self._pending = None
        self._take_back()

    def check(self) -> None:
        """Raises if another rank has failed, and the group is aborted."""
        if self._error is not None:
            self._take_back()  # this error takes the place of the other, if that is still to come
            raise PeerError(str(self._error))

    def _take_back(self) -> None:
        thread, self._interrupted = self._interrupted, None
        if thread is not None:
            _raise_in(thread, None)

    def _ask(self, is_over: Callable[[], bool]) -> bool:
        # A new thread's current device is the first: asking there would take memory on it.
        with torch.get_device_module(self._device.type).device(self._device):
            return is_over()

    def look(self) -> None:
        """Looks at the board, if the same step is pending as before."""
        pending, seen = self._pending, self._seen
        self._seen = pending
        if pending is None or pending is not seen or self._error is not None:
            return
        with contextlib.suppress(RuntimeError):  # a query fails while a graph is captured
            if pending.is_over is not None and self._ask(pending.is_over):
                self._pending = None
                return
        text = self._board.look(pending.place)
        if text is None or self._pending is not pending:
            return
        self._error = peer_error(text)
        self._interrupted = pending.thread
        # Before the abort, after which the loop would go on with gradients that are not averages.
        _raise_in(pending.thread, self._error)
        backend = backend_for(self._group, self._device)
        with contextlib.suppress(Exception):  # a backend that cannot be aborted, or is already
            backend.abort()


def _watch(watch: weakref.ref[Watch]) -> None:
    while True:
        time.sleep(SLICE.total_seconds())
        alive = watch()
        if alive is None:
            return
        alive.look()
        del alive


def _raise_in(thread: int, error: PeerError | None) -> None:
    """Raises an error in another thread, at its next line; None takes an earlier one back."""
    what: Any = None
    if error is not None:
        # Python makes the exception from a class, without arguments.
        text = str(error)

        def init(self: PeerError) -> None:
            PeerError.__init__(self, text)

        what = ctypes.py_object(
            type("PeerError", (PeerError,), {"__init__": init, "__module__": PeerError.__module__})
        )
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
