"""Defines ``PowerSGDState`` and its two hooks.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks._torch import comm_hooks
from commhooks.checkpoint._format import MAX_STEP, check_fields, check_numbers, is_int_between, read
from commhooks.classic._hook_access import memory_of
from commhooks.classic._hooked_model import Group
from commhooks.classic._launch import BucketFuture, Launcher, WireDtypes, classic_hook, classics
from commhooks.classic._powersgd_models import (
    BATCHED,
    LAYERWISE,
    SETTINGS,
    Inner,
    Kind,
    OnModels,
    PowerSGDSettings,
    scheme_of,
)
from commhooks.core._settings import check_seed, check_value, declared
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook._parameters import ddp_models
from commhooks.hook._state import HookState
from commhooks.schemes import batched_powersgd, powersgd
from commhooks.wrappers._feedback import RESIDUAL

__all__ = ["CompressionStats", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


logger = logging.getLogger("commhooks.classic")


class CompressionStats(PowerSGDSettings):
    """Holds the statistics of PowerSGDState, over all models."""

    __slots__ = (
        "next_stats_report",
        "total_numel_after_compression",
        "total_numel_before_compression",
    )

    def _start_counting(self) -> None:
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Returns the compression rate, and the entries before and after, over compressed steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def _count(self, inner: Inner, kind: Kind, bucket: GradBucket) -> None:
        """Adds a compressed bucket to the statistics; logs them every few steps."""
        before, after = inner.count(self, kind, bucket.parameters())
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and inner.hook.step >= self.next_stats_report:
            self.next_stats_report = inner.hook.step + self.compression_stats_logging_frequency
            rate, before, after = self.compression_stats()
            logger.info(
                "step %d: PowerSGD sent %d entries for %d, rate %.1f",
                inner.hook.step, after, before, rate,
            )  # fmt: skip


# ---- the state and its hooks


_PICKLE = "the pickled PowerSGDState"


class PowerSGDState(CompressionStats):
    """Holds the settings and the memory of ``powerSGD_hook`` and ``batched_powerSGD_hook``.

    One state serves any number of models, with memory and a step count for each. Settings may be
    changed between two steps, equally on all ranks, and take effect in the next step. A pickled or
    copied state has no process group, and continues on the first model that it is used on.

    A state that was pickled on one rank has the memory of that rank. Loaded on all ranks, it
    continues on the rank that saved it; the others take what all ranks share, and start with a
    residual of zero, see :meth:`gathered`.

    Args:
        process_group: ranks to average over. None: the ranks of the model.
        matrix_approximation_rank: rank of the approximation.
        start_powerSGD_iter: number of dense steps at the start; 0 and 1 are allowed.
        min_compression_rate: a matrix is compressed if its factors, times this, are smaller.
        use_error_feedback: adds to each gradient what earlier steps did not send.
        warm_start: starts from the factors of the previous step.
        orthogonalization_epsilon: accepted, and changes nothing: zero and rank-deficient matrices
            are orthogonalised without it.
        random_seed: seed of the first factors, and without ``warm_start`` of those of every step;
            the same on every rank.
        compression_stats_logging_frequency: steps between two log lines of ``compression_stats``.
        batch_tensors_with_same_shape: accepted, and changes nothing: all matrices of a bucket are
            always computed together.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)
    """

    # As in torch: assigning to a setting with a wrong name is an error.
    __slots__ = (
        "process_group",
        *SETTINGS,
        "_on_models",
        "_rng",
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
        # As in torch, which takes 0 for 1.
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._start_counting()
        self._rng: Any = None
        self._on_models = OnModels()
        scheme_of(self, LAYERWISE, ())  # raises for a bad setting here, not in the first step

    # ---- for users

    @property
    def iter(self) -> int:
        """Returns the number of steps so far; of several models, the largest."""
        return self._on_models.step()

    @iter.setter
    def iter(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"PowerSGDState.iter is a number of steps, 0 or more, got {value!r}")
        self._on_models.set_step(value)

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Counts a step at its last bucket, for user-written hooks that take this state.

        The hooks of this package count steps themselves, and this method does nothing for them.
        """
        if bucket.is_last() and not self._on_models.inners:
            self.iter += 1

    def state_dict(self, *, gather: bool = False, dst: int | None = None) -> dict[str, Any]:
        """Returns this rank's memory, step count and scheme, or with ``gather`` those of all ranks.

        See :meth:`commhooks.hook.HookState.state_dict`.

        Raises:
            RegistrationError: the state is registered on no model, or on several.
        """
        hook = self._only_hook("state_dict")
        if hook is None:
            raise RegistrationError(
                "PowerSGDState.state_dict: it is kept by parameter name: register the state "
                "on a model first, ddp_model.register_comm_hook(state, powerSGD_hook)"
            )
        return hook.state_dict(gather=gather, dst=dst)

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continues from a saved state: now, or at first use if it is not registered yet.

        See :meth:`commhooks.hook.HookState.load_state_dict`.

        Raises:
            CheckpointError: the state is foreign, another rank's, or does not fit; nothing changed.
        """
        hook = self._only_hook("load_state_dict")
        # Without a model there are no parameter names to check the state against: it waits.
        if hook is None:
            self._on_models.saved, self._on_models.was_pickled = [(state, strict)], False
        else:
            hook.load_state_dict(state, strict=strict)

    @property
    def error_dict(self) -> Mapping[str, Tensor]:
        """Returns copies of what this rank has not sent yet, by parameter name.

        Raises:
            RegistrationError: the state is in use on several models.
        """
        return self._copied("error_dict", RESIDUAL)

    @property
    def q_memory_dict(self) -> Mapping[str, Tensor]:
        """Returns copies of the right factors that the next step starts from, by name.

        Of shape (rank, side), the transpose of torch's.
        ``batched_powerSGD_hook`` keeps one per bucket, by the name of its first parameter.

        Raises:
            RegistrationError: the state is in use on several models.
        """
        return self._copied("q_memory_dict", powersgd.KEY, batched_powersgd.KEY)

    @property
    def p_memory_dict(self) -> Mapping[str, Tensor]:
        """Returns an empty dictionary: left factors are computed in every step, not kept."""
        return MappingProxyType({})

    @property
    def rng(self) -> Any:
        """Returns a NumPy generator seeded by ``random_seed``, as in torch.

        No hook draws from it: random factors depend only on the parameter's name, the step and
        ``random_seed``, so that a resumed run draws the same ones.
        """
        if self._rng is None:
            from numpy.random import RandomState

            self._rng = RandomState(self.random_seed)
        return self._rng

    def _copied(self, call: str, *keys: str) -> Mapping[str, Tensor]:
        inner = self._on_models.only(call)
        values = memory_of(inner.hook).items() if inner is not None else ()
        # Read-only: a script for torch's state that writes here would lose it without a word.
        return MappingProxyType({name: value.clone() for key, name, value in values if key in keys})

    # ---- copies

    def gathered(self) -> "PowerSGDState":
        """Returns a copy with the memory of all ranks, for one rank to save; all ranks call this.

        The copy continues bit for bit on every rank, and on another number of ranks, too. It is as
        large as the memory of all ranks together.

        Example:
            >>> state = powersgd_state.gathered()
            >>> if dist.get_rank() == 0:
            >>>     torch.save({"comm_hook": powerSGD_hook, "comm_hook_state": state}, path)
        """
        if not self._on_models.inners:  # before the first step: what was loaded is gathered
            self._register_early()
        copied = PowerSGDState.__new__(PowerSGDState)
        hooks = [inner.hook.state_dict(gather=True) for inner in self._on_models.inners.values()]
        copied.__setstate__(self._pickled(hooks))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self._pickled([inner.hook.state_dict() for inner in self._on_models.inners.values()])

    def _pickled(self, hooks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        # Plain values only: a process group cannot be pickled, nor loaded with weights_only=True.
        return {
            "settings": {name: getattr(self, name) for name in SETTINGS},
            "iter": self.iter,
            "numel": (self.total_numel_before_compression, self.total_numel_after_compression),
            "saved": [(state, True) for state in hooks] or list(self._on_models.saved),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        # ``torch.load`` calls this with whatever a file says, so all of it is checked first.
        check_fields(saved, ("settings", "iter", "numel", "saved"), _PICKLE)
        settings, numel, states = saved["settings"], saved["numel"], saved["saved"]
        check_fields(settings, SETTINGS, _PICKLE)
        check_numbers(saved, {"iter": (0, MAX_STEP)}, _PICKLE)
        if not _is_pair(numel) or not all(is_int_between(count, 0, MAX_STEP) for count in numel):
            raise CheckpointError(f"{_PICKLE} is damaged: its 'numel' are no two numbers")
        if type(states) is not list or not all(map(_is_pair, states)):
            raise CheckpointError(f"{_PICKLE} is damaged: its 'saved' are no states")
        try:
            for state, strict in states:
                read(state, _PICKLE)
                check_value(_PICKLE, "strict", strict, bool)
            kinds = declared(PowerSGDState.__init__)
            for name in SETTINGS:
                check_value(_PICKLE, name, settings[name], kinds[name])
            check_seed(settings["random_seed"])
            self.__init__(None, **settings)  # type: ignore[misc]
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{_PICKLE} is damaged: {error}") from error
        self.total_numel_before_compression, self.total_numel_after_compression = numel
        self.next_stats_report = saved["iter"]
        self._on_models.saved, self._on_models.was_pickled = list(states), True
        self._on_models.first_iter = None if states else saved["iter"]

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in SETTINGS)
        return f"PowerSGDState({settings})"

    # ---- called by ddp_core.DistributedDataParallel, which finds these methods on a hook's state

    def backward_finished(self) -> None:
        """Notifies the hook that the backward pass has ended."""
        if (hook := self._on_models.notified_hook()) is not None:
            hook.backward_finished()

    def gradients_written(self, unused: Sequence[Tensor] = ()) -> None:
        """Notifies the hook that averages are in ``.grad``, except for ``unused``."""
        if (hook := self._on_models.notified_hook()) is not None:
            hook.gradients_written(unused)

    def step_aborted(self) -> None:
        """Notifies the hook that the backward pass of the step has raised."""
        if (hook := self._on_models.notified_hook()) is not None:
            hook.step_aborted()

    # ---- for the hooks

    def _launch(self, kind: Kind, bucket: GradBucket, wire_dtypes: WireDtypes) -> BucketFuture:
        inner = self._on_models.ready(self, kind, bucket, wire_dtypes)
        if inner.hook.step >= self.start_powerSGD_iter:
            self._count(inner, kind, bucket)
        return inner.hook.start(bucket)

    def _only_hook(self, call: str) -> HookState | None:
        """Returns the state on the only model; None if there is no model."""
        inner = self._on_models.only(call)
        return self._register_early() if inner is None else inner.hook

    def _register_early(self) -> HookState | None:
        """Makes the state on its model before the first step, and loads pending states."""
        registration = _registration_of(self)
        return None if registration is None else self._on_models.restored(self, *registration).hook


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


# torch.load(..., weights_only=True) then loads a pickled state, which has tensors, numbers and
# strings only.
torch.serialization.add_safe_globals([PowerSGDState])


def _launch_powersgd(
    kind: Kind, state: PowerSGDState, bucket: GradBucket, wire_dtypes: WireDtypes
) -> BucketFuture:
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            f"the PowerSGD hooks take a commhooks.PowerSGDState as state, got "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state._launch(kind, bucket, wire_dtypes)


# Objects with an identity: a registered hook is recognised by its launcher, also inside wrappers.
_launch_layerwise = functools.partial(_launch_powersgd, LAYERWISE)
_launch_batched = functools.partial(_launch_powersgd, BATCHED)
_kinds: dict[Launcher, Kind] = {_launch_layerwise: LAYERWISE, _launch_batched: BATCHED}


def _registration_of(state: PowerSGDState) -> tuple[Sequence[Tensor], Kind, WireDtypes] | None:
    """Returns the model that ``state`` is registered on.

    Returns:
        The model's trained parameters, and by which hook and with which dtypes of payloads the
        state is registered; None if it is on no model.
    """
    # torch does not notify a state when it is registered: the hook is first called with a bucket.
    for model in ddp_models():
        for hook, registered in comm_hooks(model):
            while hook not in classics and hasattr(hook, "__wrapped__"):
                hook = hook.__wrapped__
            classic = classics.get(hook)
            if registered is not state or classic is None or classic.launch not in _kinds:
                continue
            parameters = [p for p in model.parameters() if p.requires_grad]
            return parameters, _kinds[classic.launch], classic.wire_dtypes
    return None


@classic_hook(_launch_layerwise)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket by PowerSGD, sending each of its matrices as two thin factors.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)

    Reference: Vogels, Karimireddy and Jaggi, PowerSGD, 2019.
    """
    return _launch_layerwise(state, bucket, ())


@classic_hook(_launch_batched)
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> BucketFuture:
    """Averages a bucket by PowerSGD, with the whole bucket as one square matrix.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, batched_powerSGD_hook)
    """
    return _launch_batched(state, bucket, ())
