"""Holds one bucket's exchange under way: the generator, its future, and its measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_core.exchange._clocks import HOST, Clock, Timed, Timestamp, set_time
from ddp_core.exchange._collectives import Collective, as_request
from ddp_core.exchange._errors import CollectiveError, RoundsError, raised_in

__all__ = ["Exchange", "RoundRecord", "Task"]

Exchange = Generator[Collective, Tensor, Tensor]
clock = time.perf_counter


@dataclass(slots=True)
class RoundRecord(Timed):
    """Records the bytes and the times (``time.perf_counter``) of one collective of a bucket.

    On a GPU times are those of its streams, in some steps, and else NaN; see ``Timed.resolve``.
    """

    step: int
    bucket: int
    round: int
    collective: str
    dense_bytes: int
    payload_bytes: int
    wire_bytes: float
    resumed: float = 0.0  # the generator began to work towards this round
    yielded: float = 0.0  # it asked for the collective
    issued: float = 0.0  # the lane issued it
    done: float = 0.0  # the collective completed
    finished: float = 0.0  # decoding ended (last round only; else equal to done)
    dense_wire_bytes: float = 0.0  # what one rank would send without compression
    waited_for: bool = False  # the host of the hook did nothing else meanwhile
    moments: dict[str, Timestamp] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class Task:
    """Runs a bucket's exchange; ``ticket`` orders the buckets of a driver.

    ``joins``: the code after the last collective reads what earlier exchanges have written.
    ``dense_sends``: how often ``(n - 1) / n`` of the dense bytes are sent without compression: 2 in
    an all-reduce over ``n`` ranks, 1 in a reduce-scatter, ``n`` in an all-gather.
    ``waited_for``: the caller waits for the result before it computes anything else.
    """

    exchange: Exchange
    step: int
    bucket: int
    dense_bytes: int
    world_size: int
    max_rounds: int
    record: Callable[[RoundRecord], None] | None = None
    joins: bool = False
    clock: Clock = HOST  # of the rows' times
    dense_sends: float = 2.0
    waited_for: bool = False
    ticket: int = 0
    round: int = 0
    request: Collective | None = None
    rows: list[RoundRecord] = field(default_factory=list)
    result: Tensor | None = None
    error: BaseException | None = None
    completion: torch.futures.Future[None] = field(default_factory=torch.futures.Future)

    def advance(self, error: BaseException | None = None) -> Collective | None:
        """Runs the generator to its next request (returned) or to its end (None is returned).

        Args:
            error: the error of the pending collective, if it failed; thrown into the generator.
        """
        # Run the generator to its next request, or to its end.
        resumed = self.clock.now()
        try:
            if error is not None:
                yielded = self.exchange.throw(error)
            elif self.request is None:
                yielded = next(self.exchange)
            else:
                yielded = self.exchange.send(self.request.result())
            self.request = yielded if isinstance(yielded, Collective) else as_request(yielded)
        except StopIteration as stop:
            self.result = stop.value
            self._end()
            return None
        except BaseException as raised:
            self.exchange.close()  # it waits for an answer, if what it yielded was no request
            self.error = raised
            self._end()
            return None
        # Refuse a collective that the scheme has not declared, for which there is no lane.
        if len(self.rows) >= max(self.max_rounds, 1):
            self.error = RoundsError(
                f"step {self.step}, bucket {self.bucket}: the scheme yielded collective number "
                f"{len(self.rows) + 1} ({self.request.name}), but declares rounds="
                f"{self.max_rounds}; raise `rounds` in its traits"
            )
            self.exchange.close()
            self._end()
            return None
        # Open the row of the collective; the dense bytes are in the first row only.
        dense_bytes = self.dense_bytes if not self.rows else 0
        ranks = self.world_size
        self.rows.append(
            RoundRecord(
                self.step,
                self.bucket,
                len(self.rows),
                self.request.name,
                dense_bytes,
                self.request.payload_nbytes,
                self.request.wire_nbytes(ranks),
                dense_wire_bytes=dense_bytes * self.dense_sends * (ranks - 1) / ranks,
                waited_for=self.waited_for,
            )
        )
        set_time(self.rows[-1], "resumed", resumed)
        set_time(self.rows[-1], "yielded", self.clock.now())
        self.round = len(self.rows) - 1
        return self.request

    def failed(self, error: BaseException) -> CollectiveError:
        """Returns the error for a failed collective, with its bucket and step."""
        name = self.request.name if self.request is not None else "collective"
        failure = CollectiveError(
            f"{name} failed in step {self.step}, bucket {self.bucket}, round {self.round}: "
            f"{error}. A peer died, a link broke, or the ranks do not run the same code",
            step=self.step,
            bucket=self.bucket,
            round=self.round,
        )
        failure.__cause__ = error
        return failure

    def abort(self) -> None:
        """Ends the exchange without a result; its future holds an error."""
        self.exchange.close()
        self.error = CollectiveError(
            f"the exchange of step {self.step}, bucket {self.bucket} was aborted: its ranks have "
            f"changed",
            step=self.step,
            bucket=self.bucket,
            round=self.round,
        )
        self.completion.set_result(None)

    def _end(self) -> None:
        if self.rows:
            set_time(self.rows[-1], "finished", self.clock.now())
        for row in self.rows[:-1]:
            set_time(row, "finished", row.moments.get("done", row.done))
        if self.record is not None:
            for row in self.rows:
                self.record(row)

    def outcome(self, _: object = None) -> Tensor:
        """Returns the result, or raises the error of the exchange."""
        if isinstance(self.error, (CollectiveError, RoundsError)):
            raise self.error
        if self.error is not None:
            # Torch's future keeps an exception's text only, so the place has to be in it.
            round = min(len(self.rows), max(self.max_rounds, 1) - 1)
            line = raised_in(self.error)
            raise RuntimeError(
                f"the scheme failed in step {self.step}, bucket {self.bucket}, round {round}: "
                f"{type(self.error).__name__}: {self.error}{f' ({line})' if line else ''}"
            ) from self.error
        assert self.result is not None
        return self.result
