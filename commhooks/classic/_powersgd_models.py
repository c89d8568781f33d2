"""Defines the parts of a PowerSGDState, one per model, and saved states that await models."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.checkpoint._format import read
from commhooks.classic._hook_access import (
    continue_from,
    group_of,
    load,
    set_seed,
    set_step,
    step_under_way,
)
from commhooks.classic._hooked_model import Group, HookedModel, hooked_model
from commhooks.classic._launch import WireDtypes, cast_payloads
from commhooks.core._scheme import Scheme
from commhooks.core._settings import check_value
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook._handshake import handshake
from commhooks.hook._state import HookState
from commhooks.schemes.batched_powersgd import BatchedPowerSGD
from commhooks.schemes.powersgd import PowerSGD, payload_numel
from commhooks.wrappers._feedback import RESIDUAL, ErrorFeedback
from commhooks.wrappers._schedules import DelayedStart

__all__ = [
    "BATCHED",
    "LAYERWISE",
    "SETTINGS",
    "Inner",
    "Kind",
    "OnModels",
    "PowerSGDSettings",
    "agree_on_parts",
    "made_from",
    "scheme_of",
]


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


def scheme_of(settings: PowerSGDSettings, kind: Kind, wire_dtypes: WireDtypes) -> Scheme:
    """Makes the scheme of the present settings.

    Raises:
        TypeError, ValueError: a setting has a wrong type or value.
    """
    scheme = kind.scheme(settings)
    if check_value("PowerSGDState", "use_error_feedback", settings.use_error_feedback, bool):
        scheme = ErrorFeedback(scheme)
    # The cast is outside: dense steps travel in 16 bits, too, as with torch's wrappers.
    return cast_payloads(DelayedStart(scheme, settings.start_powerSGD_iter), wire_dtypes)


def made_from(settings: PowerSGDSettings, kind: Kind, wire_dtypes: WireDtypes) -> tuple[Any, ...]:
    """Returns what a scheme is made from, to detect a change; the seed comes last."""
    # Not the scheme itself: making one checks every setting, and this runs in each step.
    return (
        kind,
        wire_dtypes,
        settings.matrix_approximation_rank,
        settings.start_powerSGD_iter,
        settings.min_compression_rate,
        settings.use_error_feedback,
        settings.warm_start,
        settings.random_seed,
    )


# ---- states that one rank saved


Saved = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def agree_on_parts(saved: Saved, group: dist.ProcessGroup) -> None:
    """Checks that ranks without a part have loaded the same state; warns of losses.

    All ranks of ``group`` call this.

    Args:
        saved: the state that this rank has loaded.
        group: the ranks that continue.

    Raises:
        CheckpointError: some ranks have loaded their own states, and some another rank's.
    """
    common, parts = read(saved, verify=False)
    held = sorted(part.rank for part in parts)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (held, common["world_size"]), group=group)
    # The usual case: each rank has its own part, of a run with as many ranks.
    has_own_part = all(rank in present for rank, (present, _) in enumerate(everyone))
    if has_own_part and all(size == group.size() for _, size in everyone):
        return
    # Otherwise all ranks have to hold the same state: a mixture would lose the residuals of some
    # ranks without a warning.
    if any(entry != everyone[0] for entry in everyone):
        loaded = ", ".join(
            f"rank {rank} that of {present}" for rank, (present, _) in enumerate(everyone)
        )
        raise CheckpointError(
            f"PowerSGDState: the ranks have loaded different states ({loaded}). Residuals differ "
            f"per rank: every rank loads its own file, or all the same one"
        )
    size = common["world_size"]
    missing = sorted(set(range(size)) - set(held))
    residual = parts[0].memory.get(RESIDUAL, {})
    if group.rank() == 0 and missing and any(bool(value.any()) for value in residual.values()):
        warnings.warn(
            f"PowerSGDState: the state loaded was saved by rank {held[0]} of {size} alone. It "
            f"lacks the residuals of ranks {missing}, what error feedback had still to send of "
            f"their gradients; they continue with zero. To keep them, all ranks call "
            f"state.gathered(), and one saves what that returns",
            RuntimeWarning,
            stacklevel=2,
        )


# ---- parts of a state


@dataclass(eq=False)
class Inner:
    """Holds the part of a PowerSGDState on one model.

    Attributes:
        hook: runs the scheme and keeps its memory.
        group: the group of the PowerSGDState when the part was made. None: the model's.
        runs: the settings that the hook's scheme was made from.
        agreed: whether the ranks have compared what they loaded and how they count.
        restored: the saved state that was loaded, until the ranks have agreed on it.
        counted: entries of known buckets before and after compression, by settings and parameters.
    """

    hook: HookState
    group: Group
    runs: tuple[Any, ...]
    agreed: bool = False
    restored: Saved | None = None
    counted: dict[Any, tuple[int, int]] = field(default_factory=dict)

    def count(
        self, settings: PowerSGDSettings, kind: Kind, parameters: Sequence[Tensor]
    ) -> tuple[int, int]:
        """Returns how many entries a bucket has and sends."""
        # Called for every bucket: shapes are looked up once per bucket and settings.
        key = (self.runs, *map(id, parameters))
        counted = self.counted.get(key)
        if counted is None:
            shapes = [parameter.shape for parameter in parameters]
            whole = sum(shape.numel() for shape in shapes)
            counted = self.counted[key] = (whole, kind.numel(settings, shapes))
        return counted


class OnModels:
    """Holds the parts of a PowerSGDState, and the saved states for further models.

    Holds no reference to the PowerSGDState, which its methods take as ``settings``: a circle of
    references would keep the memory of a dropped state until the garbage collector runs.

    Attributes:
        inners: the parts, by model.
        first_iter: the step count that new parts start with; None: 0, or that of a saved state.
        saved: saved states that further models load, each with its ``strict``.
        was_pickled: whether these states were in a pickled PowerSGDState.
    """

    def __init__(self) -> None:
        self.inners: weakref.WeakKeyDictionary[HookedModel, Inner] = weakref.WeakKeyDictionary()
        self.first_iter: int | None = None
        self.saved: list[tuple[Saved, bool]] = []
        self.was_pickled = False

    def step(self) -> int:
        """Returns the number of steps so far; of several models, the largest."""
        if self.inners:
            return max(inner.hook.step for inner in self.inners.values())
        if self.first_iter is None and self.saved:
            saved, _ = self.saved[0]
            return int((saved if isinstance(saved, Mapping) else saved[0])["step"])
        return self.first_iter or 0

    def set_step(self, value: int) -> None:
        """Sets the step count on every model."""
        self.first_iter = value
        for inner in self.inners.values():
            if inner.hook.step != value:
                set_step(inner.hook, value)
                # The count decides whether a step is dense: ranks that count differently would
                # send payloads of different sizes.
                inner.agreed = False

    def only(self, call: str) -> Inner | None:
        """Returns the part on the only model; None if there is no model yet.

        Raises:
            RegistrationError: there are several models.
        """
        if len(self.inners) > 1:
            raise RegistrationError(
                f"PowerSGDState.{call}: the state is in use on {len(self.inners)} models; "
                f"make one for each to save them apart, or pickle the state"
            )
        return next(iter(self.inners.values()), None)

    def notified_hook(self) -> HookState | None:
        """Returns the hook of the only model, which receives events of its backward pass."""
        # Events do not name a model. With several models none is notified: each hook observes its
        # steps from autograd, as on torch's DistributedDataParallel, which has no such events.
        return next(iter(self.inners.values())).hook if len(self.inners) == 1 else None

    def ready(
        self, settings: PowerSGDSettings, kind: Kind, bucket: GradBucket, wire_dtypes: WireDtypes
    ) -> Inner:
        """Returns the part for a bucket, with the present settings.

        Ranks agree on a part before its first bucket.
        """
        parameters = bucket.parameters()
        inner = self.part(settings, hooked_model(parameters), parameters, kind, wire_dtypes)
        if not inner.agreed:
            with inner.hook.target.on_device():
                self._agree(inner)
        # All buckets of a step run one scheme, so settings change at the first. After an aborted
        # step, which is under way until the next one closes it, they change one step later.
        if bucket.index() == 0 and not step_under_way(inner.hook):
            runs = made_from(settings, kind, wire_dtypes)
            if inner.runs != runs:
                if inner.runs[-1] != settings.random_seed:
                    set_seed(inner.hook, settings.random_seed)
                inner.hook.switch(scheme_of(settings, kind, wire_dtypes), error_feedback=False)
                inner.runs = runs
        return inner

    def part(
        self,
        settings: PowerSGDSettings,
        model: HookedModel,
        parameters: Sequence[Tensor],
        kind: Kind,
        wire_dtypes: WireDtypes,
    ) -> Inner:
        """Returns the part on a model; makes a new part if there is none over the present group."""
        group = settings.process_group
        inner = self.inners.get(model)
        if inner is not None and (inner.group is group or step_under_way(inner.hook)):
            return inner
        scheme = scheme_of(settings, kind, wire_dtypes)
        hook = model.make(scheme, group, parameters, seed=settings.random_seed)
        if self.first_iter is not None:
            set_step(hook, self.first_iter)
        # The same model over another group, or wrapped again with more trained parameters: memory
        # is keyed by parameter name, so it moves.
        for earlier in [known for known in self.inners if known is model or model.extends(known)]:
            continue_from(hook, self.inners.pop(earlier).hook)
        new = self.inners[model] = Inner(hook, group, made_from(settings, kind, wire_dtypes))
        return new

    def restored(
        self,
        settings: PowerSGDSettings,
        parameters: Sequence[Tensor],
        kind: Kind,
        wire_dtypes: WireDtypes,
    ) -> Inner:
        """Returns the part on the model with these parameters, with its saved state loaded."""
        inner = self.part(settings, hooked_model(parameters), parameters, kind, wire_dtypes)
        self._restore(inner)
        return inner

    def _restore(self, inner: Inner) -> None:
        """Loads the first pending state; a pickled state may be another rank's."""
        if not self.saved:
            return
        state, strict = self.saved[0]
        load(inner.hook, state, strict=strict, alone=self.was_pickled, call="PowerSGDState")
        inner.restored = state if self.was_pickled else None
        del self.saved[0]

    def _agree(self, inner: Inner) -> None:
        """Loads a pending state, and raises on every rank if loading fails on any rank."""
        # No rank raises before the comparison: the others would wait for it.
        error: CheckpointError | None = None
        outcome = "nothing to restore"
        try:
            self._restore(inner)
            if inner.restored is not None:
                outcome = "restored"
        except CheckpointError as raised:
            error, outcome = raised, str(raised)
        group = group_of(inner.hook)
        facts = {"saved state": outcome, "iter": inner.hook.step}
        handshake("PowerSGDState, first step", facts, group)
        if error is not None:
            raise error
        if inner.restored is not None:
            agree_on_parts(inner.restored, group)
        inner.agreed, inner.restored = True, None
