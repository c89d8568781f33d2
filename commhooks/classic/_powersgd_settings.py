"""Makes schemes from the settings of a PowerSGDState."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from commhooks.classic._launch import Wires, cast_payloads
from commhooks.classic._owner import Group
from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting
from commhooks.schemes.batched_powersgd import BatchedPowerSGD
from commhooks.schemes.powersgd import PowerSGD, payload_numel
from commhooks.wrappers.feedback import ErrorFeedback
from commhooks.wrappers.schedules import DelayedStart

__all__ = ["BATCHED", "LAYERWISE", "SETTINGS", "Kind", "PowerSGDSettings", "made_from", "scheme_of"]

SETTINGS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)


class PowerSGDSettings:
    """Holds the settings of PowerSGDState, which users may change between two steps."""

    __slots__ = ()
    process_group: Group
    matrix_approximation_rank: int
    start_powerSGD_iter: int  # noqa: N815 (torch's name)
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    random_seed: int
    compression_stats_logging_frequency: int
    batch_tensors_with_same_shape: bool


class Kind(NamedTuple):
    """Describes the layer-wise or the batched variant.

    Attributes:
        scheme: makes the scheme.
        numel: returns how many entries a bucket of parameters of given shapes sends.
    """

    scheme: Callable[[PowerSGDSettings], Scheme]
    numel: Callable[[PowerSGDSettings, Sequence[torch.Size]], int]


def _layerwise(settings: PowerSGDSettings) -> Scheme:
    return PowerSGD(
        rank=settings.matrix_approximation_rank,
        min_compression_rate=settings.min_compression_rate,
        warm_start=settings.warm_start,
    )


def _layerwise_numel(settings: PowerSGDSettings, shapes: Sequence[torch.Size]) -> int:
    return payload_numel(shapes, settings.matrix_approximation_rank, settings.min_compression_rate)


def _batched(settings: PowerSGDSettings) -> Scheme:
    return BatchedPowerSGD(rank=settings.matrix_approximation_rank, warm_start=settings.warm_start)


def _batched_numel(settings: PowerSGDSettings, shapes: Sequence[torch.Size]) -> int:
    numel = sum(shape.numel() for shape in shapes)
    side = math.isqrt(max(numel - 1, 0)) + 1
    return min(numel, 2 * min(settings.matrix_approximation_rank, side) * side)


LAYERWISE = Kind(_layerwise, _layerwise_numel)
BATCHED = Kind(_batched, _batched_numel)


def scheme_of(settings: PowerSGDSettings, kind: Kind, wires: Wires) -> Scheme:
    """Makes the scheme of the present settings.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """
    scheme = kind.scheme(settings)
    if fitting("PowerSGDState", "use_error_feedback", settings.use_error_feedback, bool):
        scheme = ErrorFeedback(scheme)
    # The cast is outside: dense steps travel in 16 bits, too, as with torch's wrappers.
    return cast_payloads(DelayedStart(scheme, settings.start_powerSGD_iter), wires)


def made_from(settings: PowerSGDSettings, kind: Kind, wires: Wires) -> tuple[Any, ...]:
    """Returns what a scheme is made from, to see whether it has changed; the seed comes last."""
    # Not the scheme itself: making one checks every setting, and this runs in each step.
    return (
        kind,
        wires,
        settings.matrix_approximation_rank,
        settings.start_powerSGD_iter,
        settings.min_compression_rate,
        settings.use_error_feedback,
        settings.warm_start,
        settings.random_seed,
    )
