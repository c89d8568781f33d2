"""``PowerSGDState`` and its two hooks.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import functools
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks._errors import CheckpointError, RegistrationError
from commhooks._feedback import ErrorFeedback
from commhooks._handshake import handshake
from commhooks._model import ddp_models
from commhooks._schedules import DelayedStart
from commhooks._scheme import Scheme
from commhooks._state import HookState
from commhooks.classic._launch import (
    BucketFuture,
    Launcher,
    Wires,
    cast_payloads,
    classic_hook,
    classics,
)
from commhooks.classic._owner import Group, Owner, owner_of
from commhooks.schemes.batched_powersgd import BatchedPowerSGD
from commhooks.schemes.powersgd import PowerSGD, payload_numel

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger("commhooks.classic")


class _Kind(NamedTuple):
    """The layer-wise or the batched variant: its scheme, and the entries it sends for a bucket."""

    scheme: Callable[["PowerSGDState"], Scheme]
    numel: Callable[["PowerSGDState", Sequence[torch.Size]], int]


def _layerwise(state: "PowerSGDState") -> Scheme:
    return PowerSGD(
        rank=state.matrix_approximation_rank,
        min_compression_rate=state.min_compression_rate,
        warm_start=state.warm_start,
    )


def _layerwise_numel(state: "PowerSGDState", shapes: Sequence[torch.Size]) -> int:
    return payload_numel(shapes, state.matrix_approximation_rank, state.min_compression_rate)


def _batched(state: "PowerSGDState") -> Scheme:
    return BatchedPowerSGD(rank=state.matrix_approximation_rank, warm_start=state.warm_start)


def _batched_numel(state: "PowerSGDState", shapes: Sequence[torch.Size]) -> int:
    numel = sum(shape.numel() for shape in shapes)
    side = math.isqrt(max(numel - 1, 0)) + 1
    return min(numel, 2 * min(state.matrix_approximation_rank, side) * side)


_LAYERWISE = _Kind(_layerwise, _layerwise_numel)
_BATCHED = _Kind(_batched, _batched_numel)

_SETTINGS = (
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


@dataclass(eq=False)
class _Inner:
    """A PowerSGDState's part on one model."""

    hook: HookState
    runs: tuple[Any, ...]  # variant, wires and settings that the hook's scheme was built from
    agreed: bool = False
    numels: dict[Any, tuple[int, int]] = field(default_factory=dict)


class PowerSGDState:
    """Settings and memory of ``powerSGD_hook`` and ``batched_powerSGD_hook``.

    One state serves any number of models, each with its own memory and step count. Settings may be
    changed between two steps, on all ranks alike, and take effect in the next. A pickled or copied
    state leaves the process group behind, and continues on the first model it is used on.

    Args:
        process_group: ranks to average over; None: those of the model.
        matrix_approximation_rank: rank of the approximation.
        start_powerSGD_iter: number of dense steps first; 0 and 1 are allowed.
        min_compression_rate: a matrix is compressed if its factors, times this, are smaller.
        use_error_feedback: adds to each gradient what earlier steps did not send.
        warm_start: starts from the factors of the step before.
        orthogonalization_epsilon: accepted and not needed: zero and rank-deficient matrices are
            orthogonalised without it.
        random_seed: of the first factors; the same on every rank.
        compression_stats_logging_frequency: steps between two log lines of ``compression_stats``.
        batch_tensors_with_same_shape: kept for its name; all matrices are computed together.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)
    """

    def __init__(
        self,
        process_group: Group,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._start_empty()
        self._scheme(_LAYERWISE, ())  # refuses bad settings here and not in the first step

    def _start_empty(self) -> None:
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._inners: weakref.WeakKeyDictionary[Owner, _Inner] = weakref.WeakKeyDictionary()
        self._saved: list[Any] = []  # to be loaded by the models to come, with strictness
        self._first_iter: int | None = None

    # ---- what users read and do

    @property
    def iter(self) -> int:
        """Steps so far; of the model that made most, if there are several."""
        if self._inners:
            return max(inner.hook.step for inner in self._inners.values())
        if self._first_iter is None and self._saved:
            saved, _ = self._saved[0]
            return int((saved if isinstance(saved, Mapping) else saved[0])["step"])
        return self._first_iter or 0

    @iter.setter
    def iter(self, value: int) -> None:
        self._first_iter = value
        for inner in self._inners.values():
            inner.hook._engine.step = value

    def compression_stats(self) -> tuple[float, int, int]:
        """Rate, entries before and entries after compression, since compression started."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state on the one model that has it; every rank saves its own.

        See :meth:`commhooks.HookState.state_dict`.

        Raises:
            RegistrationError: it is registered on no model, or on several.
        """
        hook = self._only_hook("state_dict")
        if hook is None:
            raise RegistrationError(
                "PowerSGDState.state_dict: memory is kept by parameter name: register the state "
                "on a model first, ddp_model.register_comm_hook(state, powerSGD_hook)"
            )
        return hook.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state: at once, or when the state is registered and first used.

        See :meth:`commhooks.HookState.load_state_dict`.

        Raises:
            CheckpointError: foreign, of another rank, or mismatching; nothing was changed.
        """
        hook = self._only_hook("load_state_dict")
        if hook is None:
            self._saved = [(state, strict)]
        else:
            hook.load_state_dict(state, strict=strict)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        hooks = [(inner.hook.state_dict(), True) for inner in self._inners.values()]
        return {
            "settings": {name: getattr(self, name) for name in _SETTINGS},
            "iter": self.iter,
            "numel": (self.total_numel_before_compression, self.total_numel_after_compression),
            "saved": hooks or list(self._saved),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(None, **saved["settings"])  # type: ignore[misc]
        self.total_numel_before_compression, self.total_numel_after_compression = saved["numel"]
        self.next_stats_report = saved["iter"]
        self._saved = list(saved["saved"])
        self._first_iter = None if self._saved else saved["iter"]

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SETTINGS)
        return f"PowerSGDState({settings})"

    # ---- what the hooks call

    def _scheme(self, kind: _Kind, wires: Wires) -> Scheme:
        scheme = kind.scheme(self)
        if self.use_error_feedback:
            scheme = ErrorFeedback(scheme)
        return cast_payloads(DelayedStart(scheme, self.start_powerSGD_iter), wires)

    def _settings(self, kind: _Kind, wires: Wires) -> tuple[Any, ...]:
        return (
            kind,
            wires,
            self.matrix_approximation_rank,
            self.start_powerSGD_iter,
            self.min_compression_rate,
            self.use_error_feedback,
            self.warm_start,
            self.batch_tensors_with_same_shape,
        )

    def _launch(self, kind: _Kind, bucket: GradBucket, wires: Wires) -> BucketFuture:
        parameters = bucket.parameters()
        inner = self._inner(owner_of(parameters), parameters, kind, wires)
        if not inner.agreed:
            self._agree(inner)
        # Between two steps, or not at all: an abandoned step is closed by its successor.
        if bucket.index() == 0 and not inner.hook._engine.under_way:
            settings = self._settings(kind, wires)
            if inner.runs != settings:
                inner.hook.switch(self._scheme(kind, wires))
                inner.runs = settings
        if inner.hook.step >= self.start_powerSGD_iter:
            self._count(inner, kind, bucket, parameters)
        return inner.hook.launch(bucket)

    def _inner(
        self, owner: Owner, parameters: Sequence[Tensor], kind: _Kind, wires: Wires
    ) -> _Inner:
        inner = self._inners.get(owner)
        if inner is None:
            scheme = self._scheme(kind, wires)
            hook = owner.make(scheme, self.process_group, parameters, seed=self.random_seed)
            if self._first_iter is not None:
                hook._engine.step = self._first_iter
            for smaller in [other for other in self._inners if owner.extends(other)]:
                kept = self._inners.pop(smaller).hook.__getstate__()
                hook._engine.memory.load(kept["memory"])
                hook._engine.step = kept["step"]
            inner = self._inners[owner] = _Inner(hook, self._settings(kind, wires))
        return inner

    def _agree(self, inner: _Inner) -> None:
        """Loads what waits to be loaded; if that fails on any rank, it fails on all."""
        error: CheckpointError | None = None
        outcome = "nothing to restore"
        try:
            if self._restore(inner.hook):
                outcome = "restored"
        except CheckpointError as raised:
            error, outcome = raised, str(raised)
        handshake("PowerSGDState, first step", {"saved state": outcome}, inner.hook._group())
        if error is not None:
            raise error
        inner.agreed = True

    def _restore(self, hook: HookState) -> bool:
        if not self._saved:
            return False
        state, strict = self._saved[0]
        hook.load_state_dict(state, strict=strict)
        del self._saved[0]
        return True

    def _only_hook(self, call: str) -> HookState | None:
        """The state on the one model this is registered on; None if it is on none yet."""
        if not self._inners:
            return self._register_early()
        if len(self._inners) > 1:
            raise RegistrationError(
                f"PowerSGDState.{call}: the state is in use on {len(self._inners)} models; "
                f"make one for each to save them apart, or pickle the state"
            )
        return next(iter(self._inners.values())).hook

    def _register_early(self) -> HookState | None:
        """Does before the first step what it would do, on the model this is registered on."""
        for model in ddp_models():
            for hook, state in model._comm_hooks:
                classic = classics.get(hook)
                if state is not self or classic is None or classic.launch not in _kinds:
                    continue
                parameters = [one for one in model.parameters() if one.requires_grad]
                kind = _kinds[classic.launch]
                inner = self._inner(owner_of(parameters), parameters, kind, classic.wires)
                self._restore(inner.hook)
                return inner.hook
        return None

    def _count(
        self, inner: _Inner, kind: _Kind, bucket: GradBucket, parameters: Sequence[Tensor]
    ) -> None:
        """Adds a compressed bucket to the statistics, and logs them when it is time."""
        key = (inner.runs, *map(id, parameters))
        if key not in inner.numels:
            shapes = [parameter.shape for parameter in parameters]
            whole = sum(shape.numel() for shape in shapes)
            inner.numels[key] = (whole, kind.numel(self, shapes))
        before, after = inner.numels[key]
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and inner.hook.step >= self.next_stats_report:
            self.next_stats_report = inner.hook.step + self.compression_stats_logging_frequency
            rate, before, after = self.compression_stats()
            logger.info(
                "step %d: PowerSGD sent %d entries for %d, rate %.1f",
                inner.hook.step, after, before, rate,
            )  # fmt: skip


# torch.load(..., weights_only=True) then takes a pickled state, which holds tensors, numbers and
# strings only.
torch.serialization.add_safe_globals([PowerSGDState])


def _launch_powersgd(
    kind: _Kind, state: PowerSGDState, bucket: GradBucket, wires: Wires
) -> BucketFuture:
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            f"the PowerSGD hooks take a commhooks.PowerSGDState as state, got "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state._launch(kind, bucket, wires)


_launch_layerwise = functools.partial(_launch_powersgd, _LAYERWISE)
_launch_batched = functools.partial(_launch_powersgd, _BATCHED)
_kinds: dict[Launcher, _Kind] = {_launch_layerwise: _LAYERWISE, _launch_batched: _BATCHED}


@classic_hook(_launch_layerwise)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket by PowerSGD, each matrix of it as two thin factors.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)

    Reference: Vogels, Karimireddy and Jaggi, PowerSGD, 2019.
    """
    return _launch_layerwise(state, bucket, ())


@classic_hook(_launch_batched)
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket by PowerSGD on the whole of it as one square matrix.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, batched_powerSGD_hook)
    """
    return _launch_batched(state, bucket, ())
