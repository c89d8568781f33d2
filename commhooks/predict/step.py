"""Predicts the time of a training step: buckets travel while backward computes the next ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from commhooks.core.scheme import Scheme
from commhooks.predict.collectives import collective_seconds
from commhooks.predict.device import Device
from commhooks.predict.fabric import Fabric
from commhooks.predict.planned import Planned, planned
from commhooks.predict.workload import Buckets, Workload

__all__ = ["Step", "exchanges_of", "predict_step"]

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """Holds a prediction of one step.

    Attributes:
        step_s: seconds of the step.
        compute_s: seconds that it would take without communication and without a scheme.
        wire_s: seconds in which the links are busy.
        codec_s: seconds of the scheme's computations.
        exposed_s: ``step_s - compute_s``: what communication and the scheme cost.
        payload_nbytes: bytes that a rank hands to collectives.
        rounds: collectives.
    """

    step_s: float
    compute_s: float
    wire_s: float
    codec_s: float
    payload_nbytes: int
    rounds: int

    @property
    def exposed_s(self) -> float:
        """Returns what communication and the scheme add to the step."""
        return self.step_s - self.compute_s


def exchanges_of(
    scheme: Scheme, workload: Workload, ranks: int, *, cap_mb: float = 25.0
) -> tuple[Buckets, list[Planned]]:
    """Returns the buckets of a step under a scheme, and the exchange of each."""
    buckets = workload.buckets(
        cap_mb=cap_mb,
        kind_of=lambda name, shape: scheme.bucket_group(name, shape, torch.float32),
    )
    return buckets, [planned(scheme, shapes, ranks) for shapes in buckets.shapes]


def predict_step(
    scheme: Scheme,
    workload: Workload,
    *,
    ranks: int,
    fabric: Fabric,
    device: Device,
    cap_mb: float = 25.0,
) -> Step:
    """Predicts a step of a scheme.

    Args:
        scheme: the scheme, wrappers included: its own payloads, rounds and computations count.
        workload: the step without communication.
        ranks: number of ranks, 1 or more.
        fabric: the links between them.
        device: computes the scheme's part.
        cap_mb: MiB at which a bucket is full.

    Example:
        >>> predict_step(make("int8"), workload("resnet50"), ranks=8, fabric=fabric("10gbe"),
        ...              device=device("a100")).step_s
    """
    buckets, exchanges = exchanges_of(scheme, workload, ranks, cap_mb=cap_mb)
    wire = [_seconds(one, ranks, fabric) for one in exchanges]
    codec = [device.parts(scheme, shapes, ranks) for shapes in buckets.shapes]
    core = [
        [message.wire_nbytes * fabric.core_s_per_byte for message in one.messages]
        for one in exchanges
    ]
    end, busy = _pipelined(buckets.ready, wire, core, codec, device.contention, workload)
    return Step(
        step_s=end,
        compute_s=workload.compute_s,
        wire_s=float(sum(map(sum, wire))),
        codec_s=busy,
        payload_nbytes=sum(message.nbytes for one in exchanges for message in one.messages),
        rounds=sum(len(one.messages) for one in exchanges),
    )


def _seconds(exchange: Planned, ranks: int, fabric: Fabric) -> list[float]:
    return [
        float(
            collective_seconds(
                message.collective, message.nbytes, ranks=ranks, fabric=fabric, part=message.ranks
            )
        )
        for message in exchange.messages
    ]


def _pipelined(
    ready: Times,
    wire: list[list[float]],
    core: list[list[float]],
    codec: list[tuple[float, ...]],
    contention: float,
    workload: Workload,
) -> tuple[float, float]:
    """Returns when the step ends, and the seconds of all computations of exchanges.

    The links carry one collective after the other, in the order in which they are issued. While
    backward runs, the scheme's computations, and the processor's part in moving bytes, delay it by
    the ``contention``.
    """
    ends = workload.forward_s + workload.backward_s
    link_free = device_free = delay = 0.0
    # (when it may begin, bucket, part): what is due next, in the order of time.
    due = [(float(moment), bucket, 0) for bucket, moment in enumerate(ready)]
    finished, total = ends, 0.0
    while due:
        due.sort()
        moment, bucket, part = due.pop(0)
        if part == 0:
            moment += delay  # backward is behind by what the scheme has computed so far
        seconds = codec[bucket][part]
        begin = max(moment, device_free)
        done = device_free = begin + seconds
        total += seconds
        if begin < ends + delay:
            delay += contention * seconds
        if part == len(wire[bucket]):
            finished = max(finished, done)
            continue
        begin, seconds = max(link_free, done), wire[bucket][part]
        link_free = begin + seconds
        if seconds:
            beside = min(max((ends + delay - begin) / seconds, 0.0), 1.0)
            delay += contention * core[bucket][part] * beside
        due.append((link_free, bucket, part + 1))
    return max(finished, ends + delay) + workload.optimizer_s, total
