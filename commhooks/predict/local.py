"""Predicts training with local steps (DiLoCo, local SGD): ranks communicate once in many steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from commhooks.core.scheme import Scheme
from commhooks.predict.collectives import collective_seconds
from commhooks.predict.device import Device
from commhooks.predict.fabric import Fabric
from commhooks.predict.planned import Work, planned
from commhooks.predict.workload import Workload

__all__ = ["LocalStep", "predict_local"]

# Linux: a TCP connection that was idle for longer than this begins again with ten segments.
_IDLE_S, _FIRST_NBYTES = 0.2, 10 * 1448
# Read and written per entry in float32, and operations per parameter: the distance (12 bytes), and
# Nesterov's momentum, step and copy (8, 12, 12, 12, 8).
_OUTER_NBYTES, _OUTER_CALLS = 64, 6


@dataclass(frozen=True)
class LocalStep:
    """Holds a prediction of training with local steps.

    Attributes:
        step_s: seconds of a step, averaged over a period.
        compute_s: seconds of a step without communication.
        exchange_s: seconds from the begin to the end of an exchange of one fragment.
        exposed_s: seconds in which training waits for an exchange, with the arithmetic of the outer
            optimizer.
        payload_nbytes: bytes that a rank hands to collectives in a period.
    """

    step_s: float
    compute_s: float
    exchange_s: float
    exposed_s: float
    payload_nbytes: int

    @property
    def utilisation(self) -> float:
        """Returns the share of the time that is spent computing."""
        return self.compute_s / self.step_s


def predict_local(
    scheme: Scheme,
    workload: Workload,
    *,
    every: int,
    ranks: int,
    fabric: Fabric,
    device: Device,
    fragments: int = 1,
    delay: int = 0,
    tcp: bool | None = None,
) -> LocalStep:
    """Predicts :class:`commhooks.DiLoCo` and :func:`commhooks.local.local_sgd`.

    With a delay, steps go on after the first part of the scheme's computations, those before its
    first message. Later ones are taken to be hidden, as messages are. ``Fabric.start_s`` is not
    counted.

    Args:
        scheme: of the exchanges.
        workload: a step without communication.
        every: steps between two exchanges of a parameter.
        ranks: number of ranks.
        fabric: the links between them.
        device: computes the scheme's part and the outer optimizer's.
        fragments, delay: of streaming DiLoCo.
        tcp: whether the lines are TCP, which starts slowly after a pause; by default if the
            fabric's library is not NCCL.

    Raises:
        ValueError: the settings do not fit together.

    Example:
        >>> predict_local(make("int4"), models["gpt2"], every=100, ranks=4,
        ...               fabric=fabric("1gbe"), device=device("a100")).utilisation
    """
    if every < 1 or fragments < 1 or every % fragments or not 0 <= delay < every // fragments:
        raise ValueError(
            f"predict_local(every, fragments, delay): every is a multiple of fragments, and delay "
            f"is below every / fragments, got {every}, {fragments} and {delay}"
        )
    apart = every // fragments
    idle_s = apart * workload.compute_s
    slow = _restart_s(fabric) if (fabric.library != "nccl" if tcp is None else tcp) else 0.0
    times, exposed, payload = [], [], 0
    for shapes in _fragments(workload, fragments):
        exchange = planned(scheme, shapes, ranks)
        first, *others = device.parts(scheme, shapes, ranks)
        overlaps, later = others[::2], others[1::2]
        seconds = sum(later) + (slow if idle_s > _IDLE_S else 0.0)
        for message, overlap in zip(exchange.messages, overlaps, strict=True):
            payload += message.nbytes
            one = collective_seconds(
                message.collective, message.nbytes, ranks=ranks, fabric=fabric, part=message.ranks
            )
            seconds += max(float(one), overlap)
        times.append(first + seconds)
        waits = first + max(0.0, seconds - delay * workload.compute_s)
        exposed.append(waits + device.seconds(_outer(shapes)))
    return LocalStep(
        step_s=workload.compute_s + sum(exposed) / every,
        compute_s=workload.compute_s,
        exchange_s=max(times),
        exposed_s=max(exposed),
        payload_nbytes=payload,
    )


def _outer(shapes: tuple[torch.Size, ...]) -> Work:
    """Returns what is computed before and after an exchange: a distance, and a step from it."""
    return Work(_OUTER_NBYTES * sum(shape.numel() for shape in shapes), _OUTER_CALLS * len(shapes))


def _fragments(workload: Workload, count: int) -> list[tuple[torch.Size, ...]]:
    """Returns the shapes of consecutive parts of about equal size."""
    parts: list[list[torch.Size]] = [[] for _ in range(count)]
    before = 0
    for layer in workload.layers:
        middle = before + layer.numel / 2
        parts[min(int(count * middle / workload.numel), count - 1)].append(torch.Size(layer.shape))
        before += layer.numel
    return [tuple(part) for part in parts if part]


def _restart_s(fabric: Fabric) -> float:
    """Returns what a line loses that has been idle: its window doubles once per round trip.

    After ``rounds`` round trips it has sent as much as fits into one at full rate, so that all of
    them but one are lost.
    """
    link = fabric.between
    round_trip = 2 * link.latency
    rounds = math.log2(max(1.0, link.bandwidth * round_trip / _FIRST_NBYTES))
    return max(0.0, rounds - 1) * round_trip
