"""Waiting that ends: a rank that fails tells the others, and nobody waits for it for long."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.exchange.errors import CollectiveError, PeerError
from ddp_core.exchange.shared_store import shared_store
from ddp_core.reducer.abandoned import Abandonments

__all__ = [
    "SLICE",
    "FailureBoard",
    "FutureNotDone",
    "Place",
    "failed",
    "never_completed",
    "peer_error",
    "rebuild_failed",
    "wait_for_future",
    "wait_for_work",
]

# So long nobody looks at the board; most waits are over by then.
SLICE = timedelta(seconds=1)
_SLICE = SLICE.total_seconds()


class Place(NamedTuple):
    """Describes what a rank waits for."""

    attempt: int  # steps, counting those that raised
    step: int
    bucket: int  # -1: a message of the step


class FailureBoard:
    """Tells ranks, by the process group's store, which of them have failed.

    Args:
        group: ranks that share the board.
        name: distinguishes boards of one group; the same on all ranks.

    Attributes:
        abandonments: steps that ranks have dropped, see :class:`Abandonments`.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._rank = group.rank()
        self._name = name
        self._reported = -1  # the attempt of the last report
        self._store = shared_store(group)  # without one, failures time out instead
        self.abandonments = Abandonments(group, self._store, name)

    def report(self, attempt: int, text: str) -> None:
        """Tells the other ranks; never raises. The first report of an attempt counts."""
        if self._store is not None and attempt != self._reported:
            self._reported, key = attempt, self._key(attempt)
            text = f"rank {self._rank}: {text}"
            # The process may end at once, so it waits until the others can read it.
            self._store.tell(lambda store: store.compare_set(key, "", text), _SLICE)

    def look(self, place: Place) -> str | None:
        """Returns what another rank has reported that will not come to this place.

        A store that does not answer is not waited for: what is awaited has a timeout of its own.
        """
        if self._store is None:
            return None
        key = self._key(place.attempt)

        def reported(store: Any) -> str:
            return str(store.get(key).decode()) if store.check([key]) else ""

        text = self._store.peek(reported, _SLICE)
        if not text or text.startswith(f"rank {self._rank}:"):
            return self.abandonments.look(place.step, place.bucket)
        return text

    def check(self, place: Place) -> None:
        """Raises if another rank has reported that it will not come to this place.

        Raises:
            PeerError: with the other rank's message.
        """
        text = self.look(place)
        if text is not None:
            raise peer_error(text)

    def _key(self, attempt: int) -> str:
        return f"ddp_core/{self._name}/{attempt}"


def peer_error(text: str) -> PeerError:
    """Returns the error of a rank that waits for one that has failed, with that rank's words."""
    return PeerError(
        f"another rank failed in this step, so its gradients will not come: {text}. The process "
        f"group has collectives that nobody answers; end the process and resume from the last "
        f"checkpoint"
    )


def wait_for_work(work: dist.Work, device: torch.device, board: FailureBoard, place: Place) -> None:
    """Waits for a collective; looks at the board while it does not end.

    On CUDA waiting orders streams and returns at once; a thread looks at the board, see
    :mod:`ddp_core.reducer.watch`.
    """
    if device.type != "cpu":
        work.wait()
        return
    while True:
        try:
            work.wait(SLICE)
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
    place: Place,
    *,
    of_tensor: bool = True,
    limit: timedelta | None = None,
) -> Tensor:
    """Returns the tensor of a hook's future; looks at the board while it is not complete.

    Raises:
        FutureNotDone: it is not within ``limit``.
    """
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        end = None if limit is None else time.monotonic() + limit.total_seconds()
        while not done.wait(SLICE.total_seconds()):
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
    error: BaseException, what: str, step: int, bucket: int, told: str | None = None
) -> CollectiveError:
    """Says where a wait ended badly.

    Args:
        told: what another rank has reported, which may be the cause.
    """
    place = f"step {step}, bucket {bucket}, "
    round = 0 if place not in str(error) else _round_in(str(error))
    reported = "" if told is None or isinstance(error, PeerError) else f". Reported by {told}"
    failure = CollectiveError(
        f"{what} failed in step {step}, bucket {bucket}, round {round}: {error}{reported}",
        step=step,
        bucket=bucket,
        round=round,
    )
    failure.__cause__ = error
    return failure


def never_completed(purpose: str, limit: timedelta | None) -> RuntimeError:
    """Says that a hook keeps its future for an abandoned step open."""
    return RuntimeError(
        f"a step was abandoned, and the future that the hook returned {purpose} was not completed "
        f"within {limit}, the process group's timeout. A hook that holds buckets back lets them go "
        f"in a method step_abandoned() of its state, see register_comm_hook"
    )


def rebuild_failed(error: BaseException, step: int) -> CollectiveError:
    """Says that ranks could not agree on buckets."""
    return CollectiveError(
        f"agreeing on new buckets failed before step {step}: {error}. A peer died, or the ranks do "
        f"not run the same code",
        step=step,
        bucket=0,
        round=0,
    )


def _round_in(text: str) -> int:
    """torch's futures keep an exception's text only; the runner wrote the round there."""
    digits = text.partition("round ")[2]
    return int(digits[: len(digits) - len(digits.lstrip("0123456789"))] or 0)
