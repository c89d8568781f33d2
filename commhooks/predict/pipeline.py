"""Simulates exchanges of buckets beside backward, for many cases at once.

The links carry the bytes of one message after the other. Latency is shared where the fabric says so
(``Fabric.overlap``): lanes (:mod:`ddp_core.exchange.lanes`) issue a bucket's n-th message without
waiting for the n-th messages of earlier buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commhooks.predict.contention import Contention

__all__ = ["AT_ONCE", "Parts", "pipelined"]

Times = NDArray[np.float64]
# All-reduces that run at once in a lane: torch gives each group of Gloo two threads. Messages
# between pairs, of which all-gather and all-to-all consist, need no thread.
AT_ONCE = 2


@dataclass(frozen=True)
class Parts:
    """Holds what exchanges take: arrays by bucket, part of an exchange, and case.

    An exchange computes, sends, computes, and so on: it has one computation more than messages. It
    may also compute while a message travels.

    Attributes:
        ready: seconds from the begin of a step to a bucket's last gradient, by bucket and case.
            Infinite: the case has no such bucket.
        rounds: number of messages, by bucket and case.
        codec: seconds of computations.
        overlap: seconds of computations while a message travels.
        wire: seconds of messages.
        shared: seconds of these that are latency, in which the links carry other messages.
        limited: whether a message is one of ``AT_ONCE`` at most in its lane.
        core: seconds of a processor that moves the bytes of messages.
    """

    ready: Times
    rounds: NDArray[np.int64]
    codec: Times
    overlap: Times
    wire: Times
    shared: Times
    limited: NDArray[np.bool_]
    core: Times

    @classmethod
    def empty(cls, buckets: int, rounds: int, cases: tuple[int, ...]) -> Parts:
        """Returns arrays for up to so many buckets and messages each."""
        return cls(
            ready=np.full((buckets, *cases), np.inf),
            rounds=np.zeros((buckets, *cases), dtype=np.int64),
            codec=np.zeros((buckets, rounds + 1, *cases)),
            # As long as ``codec``: one index finds both.
            overlap=np.zeros((buckets, rounds + 1, *cases)),
            wire=np.zeros((buckets, rounds + 1, *cases)),
            shared=np.zeros((buckets, rounds + 1, *cases)),
            limited=np.zeros((buckets, rounds + 1, *cases), dtype=np.bool_),
            core=np.zeros((buckets, rounds + 1, *cases)),
        )

    def fill(self, seconds: Sequence[float], at: tuple[int, ...]) -> None:
        """Puts in what ``Device.parts`` returns for a bucket.

        Args:
            at: the bucket, and the case's first places; those that are left out get the same.
        """
        bucket, *case = at
        for part, value in enumerate(seconds):
            whole = self.overlap if part % 2 else self.codec
            place = (bucket, part // 2, *case)
            whole[place] = value
        self.rounds[at] = len(seconds) // 2


def pipelined(parts: Parts, *, backward_ends: float, contention: Contention) -> Times:
    """Returns the seconds after which all exchanges and backward are over, by case.

    The device computes one part after the other, and the links carry the bytes of one message after
    the other, in the order in which they are due; a message has arrived after its latency, in which
    the links carry others. A message that waits for a place in its lane has its time on the links
    all the same, which is a little too early. While backward runs, the schemes' computations, and
    the processor's part in moving bytes, delay it as ``contention`` says.

    Args:
        parts: of all cases.
        backward_ends: seconds from the begin of a step.
        contention: seconds by which backward is longer, per second of computations.
    """
    buckets, width, *cases = parts.codec.shape
    count = int(np.prod(cases))
    due = parts.ready.reshape(buckets, count).copy()  # when a bucket's next part may begin
    rounds = parts.rounds.reshape(buckets, count)
    arrays = parts.codec, parts.overlap, parts.wire, parts.shared, parts.limited, parts.core
    codec, overlap, wire, shared, limited, core = (one.reshape(-1, count) for one in arrays)
    places = np.zeros((width, AT_ONCE, count))  # when each place of a lane is free again
    part = np.zeros((buckets, count), dtype=np.int64)
    case = np.arange(count)
    link_free, device_free, delay = (np.zeros(count) for _ in range(3))
    finished = np.full(count, backward_ends)
    while buckets:
        bucket = due.argmin(axis=0)
        moment = due[bucket, case]
        open_ = np.isfinite(moment)
        if not open_.any():
            break
        number = part[bucket, case]
        at = bucket * width + np.minimum(number, width - 1)
        # A case that is over goes on with parts of no length, which change nothing.
        # Backward is behind by what the schemes have computed so far.
        moment = np.where(open_, moment + np.where(number == 0, delay, 0.0), 0.0)
        seconds = np.where(open_, codec[at, case], 0.0)
        begin = np.maximum(moment, device_free)
        device_free = begin + seconds
        taken = np.where(number == 0, contention.first, contention.later) * seconds
        delay = delay + np.where(begin < backward_ends + delay, taken, 0.0)
        last = ~open_ | (number >= rounds[bucket, case])
        finished = np.where(last, np.maximum(finished, device_free), finished)

        sends = device_free
        seconds = np.where(last, 0.0, overlap[at, case])
        delay = delay + np.where(sends < backward_ends + delay, contention.later * seconds, 0.0)
        device_free = sends + seconds

        begin = np.maximum(link_free, sends)
        latency = shared[at, case]
        seconds = np.where(last, 0.0, wire[at, case] - latency)
        beside = np.clip(
            (backward_ends + delay - begin) / np.where(seconds > 0, seconds, 1.0), 0.0, 1.0
        )
        delay = delay + np.where(seconds > 0, contention.moving * core[at, case] * beside, 0.0)
        link_free = np.where(last, link_free, begin + seconds)
        lane = np.minimum(number, width - 1)
        place = places[lane, :, case].argmin(axis=1)
        free, takes_place = places[lane, place, case], ~last & limited[at, case]
        sent = np.where(takes_place, np.maximum(link_free, free + seconds), link_free)
        arrived = sent + latency
        places[lane, place, case] = np.where(takes_place, arrived, free)
        due[bucket, case] = np.where(last, np.inf, arrived)
        part[bucket, case] = number + 1
    ends: Times = np.maximum(finished, backward_ends + delay).reshape(cases)
    return ends
