"""Predicts the time of training steps, in which buckets travel while backward computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from commhooks.core._scheme import Scheme
from commhooks.core._settings import shown
from commhooks.predict._collectives import collective_seconds, shared_seconds
from commhooks.predict._device import Contention, Device
from commhooks.predict._exchange_plan import ExchangePlan, Message, trace_exchange
from commhooks.predict._fabric import Fabric
from commhooks.predict._workload import Buckets, Layer, Workload

__all__ = [
    "AT_ONCE",
    "MAX_RANKS",
    "Parts",
    "Step",
    "Steps",
    "exchanges_of",
    "message_seconds",
    "pipelined",
    "predict_step",
    "predict_steps",
]


Times = NDArray[np.float64]
# All-reduces that run at once in a lane: torch gives each group of Gloo two threads. Messages
# between pairs, of which all-gather and all-to-all consist, need no thread.
AT_ONCE = 2


@dataclass(frozen=True)
class Parts:
    """Holds the times of exchanges: arrays by bucket, part of an exchange, and case.

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
        core: processor seconds that move the bytes of messages.
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
        """Returns arrays for this number of buckets, and of messages per bucket."""
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
        """Fills in what ``Device.parts`` returns for a bucket.

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
    """Returns the seconds after which backward and all exchanges are done, by case.

    The device computes one part after the other, and the links carry the bytes of one message after
    the other, in the order in which they are due; a message arrives after its latency, during which
    the links carry other messages. A message that waits for a place in its lane is counted on the
    links a little too early. While backward runs, the schemes' computations, and the processor time
    of moving bytes, delay backward as ``contention`` says.

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
    codec, overlap, wire, shared, limited, core = (values.reshape(-1, count) for values in arrays)
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
        # A case that is over continues with parts of no length, which change nothing.
        # Backward is behind by what the schemes have computed so far.
        moment = np.where(open_, moment + np.where(number == 0, delay, 0.0), 0.0)
        seconds = np.where(open_, codec[at, case], 0.0)
        begin = np.maximum(moment, device_free)
        device_free = begin + seconds
        taken = np.where(number == 0, contention.first, contention.later) * seconds
        delay = delay + np.where(begin < backward_ends + delay, taken, 0.0)
        last = ~open_ | (number >= rounds[bucket, case])
        finished = np.where(last, np.maximum(finished, device_free), finished)

        # Computations while the message travels.
        sends = device_free
        seconds = np.where(last, 0.0, overlap[at, case])
        delay = delay + np.where(sends < backward_ends + delay, contention.later * seconds, 0.0)
        device_free = sends + seconds

        # The message on the links, and the processor time that moves it.
        begin = np.maximum(link_free, sends)
        latency = shared[at, case]
        seconds = np.where(last, 0.0, wire[at, case] - latency)
        beside = np.clip(
            (backward_ends + delay - begin) / np.where(seconds > 0, seconds, 1.0), 0.0, 1.0
        )
        delay = delay + np.where(seconds > 0, contention.moving * core[at, case] * beside, 0.0)
        link_free = np.where(last, link_free, begin + seconds)
        # Its place in the lane, and when the next part is due.
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


# ---- steps


# A plan holds what each rank sends to each other one: of more ranks it takes minutes and gigabytes.
MAX_RANKS = 2**14

Layout = Literal["scheme"] | None  # as of ``register``


@dataclass(frozen=True)
class Step:
    """Holds the prediction of one step.

    Attributes:
        step_s: seconds of the step.
        compute_s: seconds that it would take without communication and without a scheme.
        wire_s: seconds of all messages, each by itself.
        codec_s: seconds of the scheme's computations.
        exposed_s: ``step_s - compute_s``: the time that communication and the scheme add.
        payload_nbytes: bytes that a rank hands to collectives.
        wire_nbytes: bytes that a rank sends, by the formulas of the collectives.
        rounds: collectives.
    """

    step_s: float
    compute_s: float
    wire_s: float
    codec_s: float
    payload_nbytes: int
    wire_nbytes: float
    rounds: int

    @property
    def exposed_s(self) -> float:
        """Returns the time that communication and the scheme add to the step."""
        return self.step_s - self.compute_s


@dataclass(frozen=True)
class Steps:
    """Holds predictions in arrays by scheme, number of ranks and fabric.

    Attributes:
        compute_s: seconds of a step without communication and without a scheme.
        step_s, wire_s, codec_s: see :class:`Step`.
        payload_nbytes, wire_nbytes, rounds: as well, by scheme and number of ranks only.
    """

    compute_s: float
    step_s: Times
    wire_s: Times
    codec_s: Times
    payload_nbytes: NDArray[np.int64]
    wire_nbytes: Times
    rounds: NDArray[np.int64]

    @property
    def exposed_s(self) -> Times:
        """Returns the time that communication and the scheme add to each step."""
        return self.step_s - self.compute_s

    def __getitem__(self, index: tuple[int, int, int]) -> Step:
        """Returns the prediction for a scheme, a number of ranks and a fabric, by position."""
        return Step(
            step_s=float(self.step_s[index]),
            compute_s=self.compute_s,
            wire_s=float(self.wire_s[index]),
            codec_s=float(self.codec_s[index]),
            payload_nbytes=int(self.payload_nbytes[index[:2]]),
            wire_nbytes=float(self.wire_nbytes[index[:2]]),
            rounds=int(self.rounds[index[:2]]),
        )


def exchanges_of(
    scheme: Scheme, workload: Workload, ranks: int, *, cap_mb: float = 25.0
) -> tuple[Buckets, list[ExchangePlan]]:
    """Returns the buckets of a step under a scheme, and each bucket's exchange."""
    buckets = _Buckets(workload, cap_mb, 1.0, None).of(scheme)
    return buckets, [trace_exchange(scheme, shapes, ranks) for shapes in buckets.shapes]


def predict_step(
    scheme: Scheme,
    workload: Workload,
    *,
    ranks: int,
    fabric: Fabric,
    device: Device,
    cap_mb: float = 25.0,
    first_mb: float = 1.0,
    layout: Layout = None,
) -> Step:
    """Predicts a step of a scheme.

    Args:
        scheme: the scheme, wrappers included: its own payloads, rounds and computations count.
        workload: the step without communication.
        ranks: number of ranks, 1 to ``MAX_RANKS`` (16,384).
        fabric: the links between them.
        device: computes the scheme's part.
        cap_mb, first_mb: MiB at which a bucket, and the first one, are full.
        layout: see :func:`commhooks.register`; on torch's class None is all there is.

    Example:
        >>> a100 = device("a100")
        >>> predict_step(make("int8"), model("resnet50").workload(a100), ranks=8,
        ...              fabric=fabric("10gbe"), device=a100).step_s
    """
    steps = predict_steps(
        [scheme],
        workload,
        ranks=[ranks],
        fabrics=[fabric],
        device=device,
        cap_mb=cap_mb,
        first_mb=first_mb,
        layout=layout,
    )
    return steps[0, 0, 0]


def predict_steps(
    schemes: Sequence[Scheme],
    workload: Workload,
    *,
    ranks: Sequence[int],
    fabrics: Sequence[Fabric],
    device: Device,
    cap_mb: float = 25.0,
    first_mb: float = 1.0,
    layout: Layout = None,
) -> Steps:
    """Predicts steps for all combinations of schemes, numbers of ranks and fabrics at once.

    Args:
        schemes: see :func:`predict_step`, as for the other arguments.
        workload: the step without communication.
        ranks: numbers of ranks.
        fabrics: the links.
        device: computes the schemes' part.
        cap_mb, first_mb: MiB at which a bucket, and the first one, are full.
        layout: see :func:`predict_step`.

    Raises:
        ValueError: a number of ranks is below 1 or above ``MAX_RANKS``.
        PredictionError: a scheme reads values of the gradient, and so cannot be predicted.
    """
    if wrong := [count for count in ranks if not 1 <= count <= MAX_RANKS]:
        raise ValueError(
            f"predict_steps(ranks=...): numbers of ranks from 1 to {MAX_RANKS:,}, got "
            f"{shown(wrong)}"
        )
    # The exchanges of each scheme, by number of ranks and bucket.
    buckets = _Buckets(workload, cap_mb, first_mb, layout)
    exchanges = [
        [
            [trace_exchange(scheme, shapes, count) for shapes in buckets.of(scheme).shapes]
            for count in ranks
        ]
        for scheme in schemes
    ]
    plain = [exchange for by_ranks in exchanges for many in by_ranks for exchange in many]
    # The times of all parts: by bucket, part, scheme, number of ranks and fabric.
    parts = Parts.empty(
        buckets=max((len(by_ranks[0]) for by_ranks in exchanges if by_ranks), default=0),
        rounds=max((len(exchange.messages) for exchange in plain), default=0),
        cases=(len(schemes), len(ranks), len(fabrics)),
    )
    for s, scheme in enumerate(schemes):
        made = buckets.of(scheme)
        parts.ready[: len(made.ready), s] = made.ready[:, None, None]
        for r, count in enumerate(ranks):
            for b, shapes in enumerate(made.shapes):
                seconds = device.parts(scheme, shapes, count)
                parts.fill(seconds, (b, s, r))
    _fill_wire(parts, exchanges, ranks, fabrics)
    # The ends of steps.
    ends = pipelined(
        parts,
        backward_ends=workload.forward_s + workload.backward_s,
        contention=device.contention,
    )
    communicating = np.count_nonzero(parts.rounds, axis=0)
    return Steps(
        compute_s=workload.compute_s,
        step_s=ends + workload.optimizer_s + workload.per_bucket_overhead_s * communicating,
        wire_s=parts.wire.sum(axis=(0, 1)),
        codec_s=(parts.codec + parts.overlap).sum(axis=(0, 1)),
        payload_nbytes=_summed(exchanges, lambda message: message.nbytes).astype(np.int64),
        wire_nbytes=_summed(exchanges, lambda message: message.wire_nbytes),
        rounds=_summed(exchanges, lambda message: 1).astype(np.int64),
    )


class _Buckets:
    """Makes the buckets of a step; schemes with equal groups of parameters share them."""

    def __init__(self, workload: Workload, cap_mb: float, first_mb: float, layout: Layout) -> None:
        self._workload, self._layout = workload, layout
        self._sizes = {"cap_mb": cap_mb, "first_mb": first_mb}
        self._made: dict[tuple[Hashable, ...], Buckets] = {}
        self._by_scheme: dict[Scheme, Buckets] = {}

    def of(self, scheme: Scheme) -> Buckets:
        if scheme not in self._by_scheme:
            kinds = {layer.name: self._kind(scheme, layer) for layer in self._workload.layers}
            key = tuple(kinds.values())
            if key not in self._made:
                self._made[key] = self._workload.buckets(
                    **self._sizes, kind_of=lambda name, shape: kinds[name]
                )
            self._by_scheme[scheme] = self._made[key]
        return self._by_scheme[scheme]

    def _kind(self, scheme: Scheme, layer: Layer) -> Hashable:
        if self._layout is None:
            return None
        return scheme.bucket_group(layer.name, torch.Size(layer.shape), torch.float32)


_Exchanges = list[list[list[ExchangePlan]]]  # by scheme, number of ranks, bucket


def _summed(exchanges: _Exchanges, value: Callable[[Message], float]) -> Times:
    """Returns the sum of a value over all messages, by scheme and number of ranks."""
    return np.array(
        [
            [
                sum(value(message) for exchange in many for message in exchange.messages)
                for many in by_ranks
            ]
            for by_ranks in exchanges
        ]
    )


def _fill_wire(
    parts: Parts, exchanges: _Exchanges, ranks: Sequence[int], fabrics: Sequence[Fabric]
) -> None:
    """Fills in the times of messages, for all schemes with equal messages at once."""
    core_s = np.array([fabric.cpu_s_per_byte for fabric in fabrics])
    for r, count in enumerate(ranks):
        places = [
            (b, m, s, message)
            for s, by_ranks in enumerate(exchanges)
            for b, exchange in enumerate(by_ranks[r])
            for m, message in enumerate(exchange.messages)
        ]
        if not places:
            continue
        *at, messages = (list(column) for column in zip(*places, strict=True))
        index = (at[0], at[1], at[2], r)
        parts.wire[index], parts.shared[index] = message_seconds(messages, count, fabrics)
        limited = [message.collective == "all_reduce" for message in messages]
        parts.limited[index] = np.array(limited)[:, None]
        sent = np.array([message.wire_nbytes for message in messages])
        parts.core[index] = sent[:, None] * core_s


def message_seconds(
    messages: Sequence[Message], ranks: int, fabrics: Sequence[Fabric]
) -> tuple[Times, Times]:
    """Returns the times of messages by message and fabric, and the shared part of each."""
    kinds: dict[tuple[str, tuple[int, ...] | None], list[int]] = defaultdict(list)
    for index, message in enumerate(messages):
        kinds[message.collective, message.ranks].append(index)
    nbytes = np.array([message.nbytes for message in messages], dtype=np.float64)
    times = np.empty((2, len(messages), len(fabrics)))
    for (collective, part), indices in kinds.items():
        for f, fabric in enumerate(fabrics):
            sizes = nbytes[indices]
            where: dict[str, Any] = {"ranks": ranks, "fabric": fabric, "part": part}
            times[0, indices, f] = collective_seconds(collective, sizes, **where)
            times[1, indices, f] = shared_seconds(collective, sizes, **where)
    return times[0], times[1]
