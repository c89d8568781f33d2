"""``PowerSGDState`` and its two hooks.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks.classic._launch import (
    BucketFuture,
    Launcher,
    Wires,
    cast_payloads,
    classic_hook,
    classics,
)
from commhooks.classic._owner import Group, Owner, owner_of
from commhooks.classic._powersgd_parts import BATCHED, LAYERWISE, Counted, Inner, Kind
from commhooks.classic._saved_alone import agree_on_parts
from commhooks.classic._views import MemoryByBucket
from commhooks.core.scheme import Scheme
from commhooks.core.settings import fitting
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook import saving as _checkpoint_hook
from commhooks.hook.handshake import handshake
from commhooks.hook.parameters import ddp_models
from commhooks.hook.state import HookState
from commhooks.wrappers.feedback import ErrorFeedback
from commhooks.wrappers.schedules import DelayedStart

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger("commhooks.classic")


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


class PowerSGDState(MemoryByBucket):
    """Settings and memory of ``powerSGD_hook`` and ``batched_powerSGD_hook``.

    One state serves any number of models, each with its own memory and step count. Settings may be
    changed between two steps, on all ranks alike, and take effect in the next. A pickled or copied
    state leaves the process group behind, and continues on the first model it is used on.

    Pickled on one rank it holds that rank's memory. Loaded on all, it continues on the rank that
    saved it; the others take what all ranks share, and go on with a residual of zero, see
    :meth:`gathered`.

    Args:
        process_group: ranks to average over; None: those of the model.
        matrix_approximation_rank: rank of the approximation.
        start_powerSGD_iter: number of dense steps first; 0 and 1 are allowed.
        min_compression_rate: a matrix is compressed if its factors, times this, are smaller.
        use_error_feedback: adds to each gradient what earlier steps did not send.
        warm_start: starts from the factors of the step before.
        orthogonalization_epsilon: accepted, and no value changes a bit: zero and rank-deficient
            matrices are orthogonalised without it.
        random_seed: of the first factors, and without ``warm_start`` of those of every step; the
            same on every rank.
        compression_stats_logging_frequency: steps between two log lines of ``compression_stats``.
        batch_tensors_with_same_shape: accepted, and changes nothing: all matrices of a bucket are
            always computed together.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)
    """

    # As torch's: a setting with a wrong name is an error.
    __slots__ = (
        "process_group",
        *_SETTINGS,
        "total_numel_before_compression",
        "total_numel_after_compression",
        "next_stats_report",
        "_inners",
        "_saved",
        "_was_pickled",
        "_first_iter",
        "__weakref__",
    )

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
        self._scheme(LAYERWISE, ())  # refuses bad settings here and not in the first step

    def _start_empty(self) -> None:
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._rng: Any = None
        self._inners: weakref.WeakKeyDictionary[Owner, Inner] = weakref.WeakKeyDictionary()
        self._saved: list[Any] = []  # to be loaded by the models to come, with strictness
        self._was_pickled = False  # what is to be loaded came by pickle
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
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"PowerSGDState.iter is a number of steps, 0 or more, got {value!r}")
        self._first_iter = value
        for inner in self._inners.values():
            if inner.hook.step != value:
                inner.hook._engine.step = value
                inner.agreed = False  # ranks that count differently send different things

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts a step at its last bucket, for a hook of one's own that has this for a state.

        The hooks of this package count by themselves, and this does nothing where they run.
        """
        if bucket.is_last() and not self._inners:
            self.iter += 1

    def compression_stats(self) -> tuple[float, int, int]:
        """Rate, entries before and entries after compression, since compression started."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def state_dict(self, *, gather: bool = False, to: int | None = None) -> dict[str, Any]:
        """This rank's state on the one model that has it, or with ``gather`` that of all ranks.

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
        return hook.state_dict(gather=gather, to=to)

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
            self._saved, self._was_pickled = [(state, strict)], False
        else:
            hook.load_state_dict(state, strict=strict)

    # ---- copies

    def gathered(self) -> "PowerSGDState":
        """A copy with the memory of every rank, which one rank saves for all; all ranks call it.

        It continues bit for bit on every rank, also on another number of ranks. As large as all
        ranks' memory together.

        Example:
            >>> state = powersgd_state.gathered()
            >>> if dist.get_rank() == 0:
            >>>     torch.save({"comm_hook": powerSGD_hook, "comm_hook_state": state}, path)
        """
        if not self._inners:
            self._register_early()
        copied = PowerSGDState.__new__(PowerSGDState)
        hooks = [inner.hook.state_dict(gather=True) for inner in self._inners.values()]
        copied.__setstate__(self._pickled(hooks))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self._pickled([inner.hook.state_dict() for inner in self._inners.values()])

    def _pickled(self, hooks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "settings": {name: getattr(self, name) for name in _SETTINGS},
            "iter": self.iter,
            "numel": (self.total_numel_before_compression, self.total_numel_after_compression),
            "saved": [(state, True) for state in hooks] or list(self._saved),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(None, **saved["settings"])  # type: ignore[misc]
        self.total_numel_before_compression, self.total_numel_after_compression = saved["numel"]
        self.next_stats_report = saved["iter"]
        self._saved, self._was_pickled = list(saved["saved"]), True
        self._first_iter = None if self._saved else saved["iter"]

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SETTINGS)
        return f"PowerSGDState({settings})"

    # ---- what ddp_core calls, see HookState

    def no_more_buckets(self) -> None:
        """Backward has ended."""
        if (hook := self._told_hook()) is not None:
            hook.no_more_buckets()

    def step_landed(self, left_alone: Sequence[Tensor] = ()) -> None:
        """The averaged gradients are where they belong, but for those of some parameters."""
        if (hook := self._told_hook()) is not None:
            hook.step_landed(left_alone)

    def step_abandoned(self) -> None:
        """The step's backward pass has raised."""
        if (hook := self._told_hook()) is not None:
            hook.step_abandoned()

    def _told_hook(self) -> HookState | None:
        """The hook that is meant; of several models autograd tells each one's steps."""
        return next(iter(self._inners.values())).hook if len(self._inners) == 1 else None

    # ---- what the hooks call

    def _scheme(self, kind: Kind, wires: Wires) -> Scheme:
        scheme = kind.scheme(self)
        if fitting("PowerSGDState", "use_error_feedback", self.use_error_feedback, bool):
            scheme = ErrorFeedback(scheme)
        return cast_payloads(DelayedStart(scheme, self.start_powerSGD_iter), wires)

    def _settings(self, kind: Kind, wires: Wires) -> tuple[Any, ...]:
        return (
            kind,
            wires,
            self.matrix_approximation_rank,
            self.start_powerSGD_iter,
            self.min_compression_rate,
            self.use_error_feedback,
            self.warm_start,
            self.random_seed,
        )

    def _launch(self, kind: Kind, bucket: GradBucket, wires: Wires) -> BucketFuture:
        parameters = bucket.parameters()
        inner = self._inner(owner_of(parameters), parameters, kind, wires)
        if not inner.agreed:
            self._agree(inner)
        # Between two steps, or not at all: an abandoned step is closed by its successor.
        if bucket.index() == 0 and not inner.hook._runner.under_way:
            settings = self._settings(kind, wires)
            if inner.runs != settings:
                if inner.runs[-1] != self.random_seed:
                    inner.hook._engine.seed = self.random_seed
                inner.hook.switch(self._scheme(kind, wires))
                inner.runs = settings
        if inner.hook.step >= self.start_powerSGD_iter:
            self._count(inner, kind, bucket, parameters)
        return inner.hook.start(bucket)

    def _inner(self, owner: Owner, parameters: Sequence[Tensor], kind: Kind, wires: Wires) -> Inner:
        inner = self._inners.get(owner)
        if inner is not None and (
            inner.group is self.process_group or inner.hook._runner.under_way
        ):
            return inner
        scheme = self._scheme(kind, wires)
        hook = owner.make(scheme, self.process_group, parameters, seed=self.random_seed)
        if self._first_iter is not None:
            hook._engine.step = self._first_iter
        # The same model with other parameters, or over another group.
        for other in [one for one in self._inners if one is owner or owner.extends(one)]:
            before = self._inners.pop(other).hook
            kept = before.__getstate__()
            hook._engine.memory.load(kept["memory"])
            hook._engine.step = kept["step"]
            before.close()
        settings = self._settings(kind, wires)
        self._inners[owner] = Inner(hook, self.process_group, settings)
        return self._inners[owner]

    def _agree(self, inner: Inner) -> None:
        """Loads what waits to be loaded; if that fails on any rank, it fails on all."""
        error: CheckpointError | None = None
        outcome = "nothing to restore"
        try:
            self._restore(inner)
            if inner.restored is not None:
                outcome = "restored"
        except CheckpointError as raised:
            error, outcome = raised, str(raised)
        group = inner.hook._binding.group()
        facts = {"saved state": outcome, "iter": inner.hook.step}
        handshake("PowerSGDState, first step", facts, group)
        if error is not None:
            raise error
        if inner.restored is not None:
            agree_on_parts(inner.restored, group)
        inner.agreed, inner.restored = True, None

    def _restore(self, inner: Inner) -> None:
        """Loads what waits for the next model; a pickled state may be another rank's alone."""
        if not self._saved:
            return
        state, strict = self._saved[0]
        hook = inner.hook
        call = "PowerSGDState"
        loaded = _checkpoint_hook.prepare(hook, state, strict, call, alone=self._was_pickled)
        _checkpoint_hook.take_up(hook, loaded)
        inner.restored = state if self._was_pickled else None
        del self._saved[0]

    def _only_hook(self, call: str) -> HookState | None:
        """The state on the one model this is registered on; None if it is on none yet."""
        inner = self._only_inner(call)
        return self._register_early() if inner is None else inner.hook

    def _only_inner(self, call: str) -> Inner | None:
        if len(self._inners) > 1:
            raise RegistrationError(
                f"PowerSGDState.{call}: the state is in use on {len(self._inners)} models; "
                f"make one for each to save them apart, or pickle the state"
            )
        return next(iter(self._inners.values()), None)

    def _register_early(self) -> HookState | None:
        """Does before the first step what it would do, on the model this is registered on."""
        for model in ddp_models():
            for hook, state in model._comm_hooks:
                while hook not in classics and hasattr(hook, "__wrapped__"):
                    hook = hook.__wrapped__
                classic = classics.get(hook)
                if state is not self or classic is None or classic.launch not in _kinds:
                    continue
                parameters = [one for one in model.parameters() if one.requires_grad]
                kind = _kinds[classic.launch]
                inner = self._inner(owner_of(parameters), parameters, kind, classic.wires)
                self._restore(inner)
                return inner.hook
        return None

    def _count(
        self, inner: Inner, kind: Kind, bucket: GradBucket, parameters: Sequence[Tensor]
    ) -> None:
        """Adds a compressed bucket to the statistics, and logs them when it is time."""
        key = (inner.runs, *map(id, parameters))
        counted = inner.counted.get(key)
        if counted is None:
            shapes = [parameter.shape for parameter in parameters]
            whole = sum(shape.numel() for shape in shapes)
            layout = inner.hook._parameters.layout(parameters)
            counted = inner.counted[key] = Counted(layout, whole, kind.numel(self, shapes))
        if bucket.index() == 0:
            inner.buckets.clear()
        inner.buckets[bucket.index()] = counted
        before, after = counted.before, counted.after
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
    kind: Kind, state: PowerSGDState, bucket: GradBucket, wires: Wires
) -> BucketFuture:
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            f"the PowerSGD hooks take a commhooks.PowerSGDState as state, got "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state._launch(kind, bucket, wires)


_launch_layerwise = functools.partial(_launch_powersgd, LAYERWISE)
_launch_batched = functools.partial(_launch_powersgd, BATCHED)
_kinds: dict[Launcher, Kind] = {_launch_layerwise: LAYERWISE, _launch_batched: BATCHED}


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
