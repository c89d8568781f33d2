"""What a PowerSGDState is made of: its two variants, and its part on one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from commhooks.classic._owner import Group
from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.hook.state import HookState
from commhooks.schemes.batched_powersgd import BatchedPowerSGD
from commhooks.schemes.powersgd import PowerSGD, payload_numel

if TYPE_CHECKING:
    from commhooks.classic._powersgd import PowerSGDState

__all__ = ["BATCHED", "LAYERWISE", "Counted", "Inner", "Kind"]


class Kind(NamedTuple):
    """The layer-wise or the batched variant: its scheme, and the entries it sends for a bucket."""

    scheme: Callable[[PowerSGDState], Scheme]
    numel: Callable[[PowerSGDState, Sequence[torch.Size]], int]


def _layerwise(state: PowerSGDState) -> Scheme:
    return PowerSGD(
        rank=state.matrix_approximation_rank,
        min_compression_rate=state.min_compression_rate,
        warm_start=state.warm_start,
    )


def _layerwise_numel(state: PowerSGDState, shapes: Sequence[torch.Size]) -> int:
    return payload_numel(shapes, state.matrix_approximation_rank, state.min_compression_rate)


def _batched(state: PowerSGDState) -> Scheme:
    return BatchedPowerSGD(rank=state.matrix_approximation_rank, warm_start=state.warm_start)


def _batched_numel(state: PowerSGDState, shapes: Sequence[torch.Size]) -> int:
    numel = sum(shape.numel() for shape in shapes)
    side = math.isqrt(max(numel - 1, 0)) + 1
    return min(numel, 2 * min(state.matrix_approximation_rank, side) * side)


LAYERWISE = Kind(_layerwise, _layerwise_numel)
BATCHED = Kind(_batched, _batched_numel)


class Counted(NamedTuple):
    """A bucket, and the entries it has before and after compression."""

    layout: Layout
    before: int
    after: int


@dataclass(eq=False)
class Inner:
    """A PowerSGDState's part on one model."""

    hook: HookState
    group: Group  # as the state had it; None: the model's
    runs: tuple[Any, ...]  # variant, wires and settings that the hook's scheme was built from
    agreed: bool = False
    restored: Mapping[str, Any] | None = None  # the saved state that was loaded, until agreed
    counted: dict[Any, Counted] = field(default_factory=dict)
    buckets: dict[int, Counted] = field(default_factory=dict)  # of the latest step, by index
