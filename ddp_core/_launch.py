"""A full bucket goes out: to the hook, or to a plain all-reduce; and is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core._errors import CollectiveError, PeerError
from ddp_core._failures import FailureBoard, failed, wait_for_future, wait_for_work
from ddp_core._flat import FlatBucket
from ddp_core._task import RoundRecord, clock
from ddp_core._timeline import BucketTimes

__all__ = ["CommHook", "Launcher", "Outcome"]

CommHook = Callable[[Any, Any], Any]  # (state, bucket) -> Future[Tensor]


class Outcome:
    """What a launched bucket is waited for: a work handle, a hook's future, or nothing."""

    __slots__ = ("future", "work")

    def __init__(self, *, work: dist.Work | None = None, future: Any = None) -> None:
        self.work, self.future = work, future

    @property
    def is_skipped(self) -> bool:
        """Nothing was sent."""
        return self.work is None and self.future is None

    def is_done(self) -> bool:
        """Whether waiting for it would return at once."""
        if self.future is not None:
            return bool(self.future.done())
        return self.work is None or self.work.is_completed()


class Launcher:
    """Starts and ends the exchange of buckets; an error says in which step and bucket.

    Args:
        group: ranks to average over.
        name: of the reducer, the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.group = group
        self.hook: tuple[CommHook, Any] | None = None
        self.step = 0  # synchronised backward passes
        self.attempt = 0  # the same, counting those that raised
        self._board = FailureBoard(group, name)

    def launch(self, bucket: FlatBucket, *, is_last: bool, times: BucketTimes | None) -> Outcome:
        """Starts the exchange of a full bucket."""
        if times is not None:
            times.launched = clock()
        try:
            if self.hook is None:
                return self._all_reduce(bucket, times)
            return self._run_hook(bucket, is_last, times)
        except Exception as error:
            self._report(bucket, error)
            raise

    def _all_reduce(self, bucket: FlatBucket, times: BucketTimes | None) -> Outcome:
        try:
            work: Any = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        except RuntimeError as error:
            raise failed(error, "all_reduce", self.step, bucket.number) from error
        if times is not None:
            nbytes = bucket.nbytes
            record = RoundRecord(
                self.step, bucket.number, 0, "all_reduce", nbytes, nbytes, 0.0, issued=clock()
            )
            times.rounds.append(record)
            work.get_future().add_done_callback(_stamp(times, record))
        return Outcome(work=work)

    def _run_hook(self, bucket: FlatBucket, is_last: bool, times: BucketTimes | None) -> Outcome:
        assert self.hook is not None
        hook, state = self.hook
        handed = bucket.as_grad_bucket(is_last=is_last)
        if times is not None:
            handed.note = times.rounds.append
        future = hook(state, handed)
        if not isinstance(future, torch._C.Future):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise TypeError(
                f"the communication hook {name} returns a torch.futures.Future[Tensor], got "
                f"{type(future).__name__}"
            )
        if times is not None:
            future.add_done_callback(_stamp(times, None))
        return Outcome(future=future)

    def finish(self, bucket: FlatBucket, outcome: Outcome, times: BucketTimes | None) -> Tensor:
        """Waits for a bucket's exchange and returns its flat averaged gradient.

        Raises:
            CollectiveError: it failed, here or on another rank; says in which round.
        """
        if times is not None:
            times.wait_began = clock()
        try:
            result = bucket.buffer
            if outcome.future is not None:
                result = wait_for_future(outcome.future, self._board, self.attempt)
            elif outcome.work is not None:
                wait_for_work(outcome.work, bucket.buffer.device, self._board, self.attempt)
        except Exception as error:
            told = self._board.look(self.attempt)
            self._report(bucket, error)
            raise failed(error, "the exchange", self.step, bucket.number, told) from error
        if times is not None:
            times.wait_ended = clock()
        return result

    def await_futures(self, futures: list[Any]) -> None:
        """Waits for futures of the buffer hook."""
        for future in futures:
            wait_for_future(future, self._board, self.attempt, of_tensor=False)

    def settle(self, bucket: FlatBucket, outcome: Outcome) -> None:
        """Waits until the exchange of an abandoned step does not write any more."""
        try:
            self.finish(bucket, outcome, None)
        except CollectiveError:  # the step has raised already
            return

    def _report(self, bucket: FlatBucket, error: Exception) -> None:
        """Tells the other ranks, which would wait for this one; hearsay is not passed on."""
        if not isinstance(error, PeerError):
            text = f"step {self.step}, bucket {bucket.number}: {type(error).__name__}: {error}"
            self._board.report(self.attempt, text)


def _stamp(times: BucketTimes, record: RoundRecord | None) -> Callable[[object], None]:
    def stamp(_: object) -> None:
        times.decoded = clock()
        if record is not None:
            record.done = record.finished = times.decoded
        elif not times.rounds:  # a hook that does not tell its rounds
            nbytes = times.nbytes
            record_of_hook = RoundRecord(0, times.bucket, 0, "hook", nbytes, nbytes, 0.0)
            record_of_hook.issued = times.launched
            record_of_hook.done = record_of_hook.finished = times.decoded
            times.rounds.append(record_of_hook)

    return stamp
