"""Predicts training with local steps (DiLoCo, local SGD): ranks communicate once in many steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commhooks.core._scheme import Scheme
from commhooks.predict import Device, Fabric, Work, Workload, collective_seconds, trace_exchange

__all__ = ["LocalStep", "predict_local"]

# Read and written per entry in float32, and operations per parameter: the distance (12 bytes), and
# Nesterov's momentum, step and copy (8, 12, 12, 12, 8).
_OUTER_NBYTES, _OUTER_CALLS = 64, 6


@dataclass(frozen=True)
class LocalStep:
    """Holds a prediction of training with local steps.

    Attributes:
        step_s: seconds of a step, averaged over a period.
        compute_s: seconds of a step without communication.
        exchange_s: seconds from the begin to the end of an exchange.
        exposed_s: seconds in which training waits for an exchange, with the arithmetic of the outer
            optimizer.
    """

    step_s: float
    compute_s: float
    exchange_s: float
    exposed_s: float

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
    delay: int = 0,
) -> LocalStep:
    """Predicts :class:`commhooks.DiLoCo` of one fragment, and :func:`commhooks.local.local_sgd`.

    With a delay, steps continue after the first part of the scheme's computations, those before its
    first message. Later ones are taken to be hidden, as messages are.

    Args:
        scheme: of the exchanges.
        workload: a step without communication.
        every: steps between two exchanges.
        ranks: number of ranks.
        fabric: the links between them.
        device: computes the scheme's part and the outer optimizer's.
        delay: steps between sending and applying; fewer than ``every``.
    """
    shapes = tuple(torch.Size(layer.shape) for layer in workload.layers)
    exchange = trace_exchange(scheme, shapes, ranks)
    first, *others = device.parts(scheme, shapes, ranks)
    overlaps, later = others[::2], others[1::2]
    seconds = sum(later)
    for message, overlap in zip(exchange.messages, overlaps, strict=True):
        message_s = collective_seconds(
            message.collective, message.nbytes, ranks=ranks, fabric=fabric, part=message.ranks
        )
        seconds += max(float(message_s), overlap)
    outer = Work(_OUTER_NBYTES * workload.numel, _OUTER_CALLS * len(shapes))
    waits = first + max(0.0, seconds - delay * workload.compute_s)
    exposed = waits + device.seconds(outer)
    return LocalStep(
        step_s=workload.compute_s + exposed / every,
        compute_s=workload.compute_s,
        exchange_s=first + seconds,
        exposed_s=exposed,
    )
