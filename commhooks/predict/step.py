"""Predicts the time of training steps: buckets travel while backward computes the next ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from commhooks.core.scheme import Scheme
from commhooks.core.settings import shown
from commhooks.predict.collectives import collective_seconds, shared_seconds
from commhooks.predict.device import Device
from commhooks.predict.fabric import Fabric
from commhooks.predict.pipeline import Parts, pipelined
from commhooks.predict.planned import Message, Planned, planned
from commhooks.predict.workload import Buckets, Layer, Workload

__all__ = [
    "MOST_RANKS",
    "Step",
    "Steps",
    "exchanges_of",
    "message_seconds",
    "predict_step",
    "predict_steps",
]

# A plan holds what each rank sends to each other one: of more ranks it takes minutes and gigabytes.
MOST_RANKS = 2**14

Times = NDArray[np.float64]
Layout = Literal["scheme"] | None  # as of ``register``


@dataclass(frozen=True)
class Step:
    """Holds a prediction of one step.

    Attributes:
        step_s: seconds of the step.
        compute_s: seconds that it would take without communication and without a scheme.
        wire_s: seconds of all messages, each by itself.
        codec_s: seconds of the scheme's computations.
        exposed_s: ``step_s - compute_s``: what communication and the scheme cost.
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
        """Returns what communication and the scheme add to the step."""
        return self.step_s - self.compute_s


@dataclass(frozen=True)
class Steps:
    """Holds predictions by scheme, number of ranks and fabric: the axes of its arrays.

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
        """Returns what communication and the scheme add to the step."""
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
) -> tuple[Buckets, list[Planned]]:
    """Returns the buckets of a step under a scheme, and the exchange of each."""
    buckets = _Buckets(workload, cap_mb, 1.0, None).of(scheme)
    return buckets, [planned(scheme, shapes, ranks) for shapes in buckets.shapes]


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
        ranks: number of ranks, 1 to ``MOST_RANKS`` (16,384).
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
    """Predicts a step for all combinations of schemes, numbers of ranks and fabrics at once.

    Args:
        schemes: see :func:`predict_step`, as for the other arguments.
        workload: the step without communication.
        ranks: numbers of ranks.
        fabrics: the links.
        device: computes the schemes' part.
        cap_mb, first_mb: MiB at which a bucket, and the first one, are full.
        layout: see :func:`predict_step`.

    Raises:
        ValueError: a number of ranks is below 1 or above ``MOST_RANKS``.
        PredictionError: a scheme reads values of the gradient, and so cannot be predicted.
    """
    if wrong := [count for count in ranks if not 1 <= count <= MOST_RANKS]:
        raise ValueError(
            f"predict_steps(ranks=...): numbers of ranks from 1 to {MOST_RANKS:,}, got "
            f"{shown(wrong)}"
        )
    buckets = _Buckets(workload, cap_mb, first_mb, layout)
    exchanges = [
        [
            [planned(scheme, shapes, count) for shapes in buckets.of(scheme).shapes]
            for count in ranks
        ]
        for scheme in schemes
    ]
    plain = [one for by_ranks in exchanges for many in by_ranks for one in many]
    parts = Parts.empty(
        buckets=max((len(by_ranks[0]) for by_ranks in exchanges if by_ranks), default=0),
        rounds=max((len(one.messages) for one in plain), default=0),
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
    ends = pipelined(
        parts,
        backward_ends=workload.forward_s + workload.backward_s,
        contention=device.contention,
    )
    communicating = np.count_nonzero(parts.rounds, axis=0)
    return Steps(
        compute_s=workload.compute_s,
        step_s=ends + workload.optimizer_s + workload.behind_s * communicating,
        wire_s=parts.wire.sum(axis=(0, 1)),
        codec_s=(parts.codec + parts.overlap).sum(axis=(0, 1)),
        payload_nbytes=_summed(exchanges, lambda one: one.nbytes).astype(np.int64),
        wire_nbytes=_summed(exchanges, lambda one: one.wire_nbytes),
        rounds=_summed(exchanges, lambda one: 1).astype(np.int64),
    )


class _Buckets:
    """Makes the buckets of a step; schemes that group parameters alike share them."""

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


_Exchanges = list[list[list[Planned]]]  # by scheme, number of ranks, bucket


def _summed(exchanges: _Exchanges, value: Callable[[Message], float]) -> Times:
    """Returns the sum of a value over all messages, by scheme and number of ranks."""
    return np.array(
        [
            [sum(value(message) for one in many for message in one.messages) for many in by_ranks]
            for by_ranks in exchanges
        ]
    )


def _fill_wire(
    parts: Parts, exchanges: _Exchanges, ranks: Sequence[int], fabrics: Sequence[Fabric]
) -> None:
    """Fills in the times of messages, those of all schemes of a kind at once."""
    core_s = np.array([fabric.core_s_per_byte for fabric in fabrics])
    for r, count in enumerate(ranks):
        places = [
            (b, m, s, message)
            for s, by_ranks in enumerate(exchanges)
            for b, one in enumerate(by_ranks[r])
            for m, message in enumerate(one.messages)
        ]
        if not places:
            continue
        *at, messages = (list(one) for one in zip(*places, strict=True))
        index = (at[0], at[1], at[2], r)
        parts.wire[index], parts.shared[index] = message_seconds(messages, count, fabrics)
        limited = [message.collective == "all_reduce" for message in messages]
        parts.limited[index] = np.array(limited)[:, None]
        sent = np.array([message.wire_nbytes for message in messages])
        parts.core[index] = sent[:, None] * core_s


def message_seconds(
    messages: Sequence[Message], ranks: int, fabrics: Sequence[Fabric]
) -> tuple[Times, Times]:
    """Returns the times of messages by message and fabric, and what part of them is shared."""
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
