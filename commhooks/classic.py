"""The hooks and states known from PyTorch, by their names, on top of ``HookState`` and the schemes.

``ddp_model.register_comm_hook(state, hook)`` takes them as it takes torch's own. A hook finds the
model behind a bucket by the bucket's parameters and keeps one :class:`commhooks.HookState` for it,
so states are keyed by parameter name, models do not mix, and any number of buckets works on Gloo.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import functools
import gc
import logging
import math
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from commhooks._errors import CheckpointError, HookNotAttachedError, RegistrationError
from commhooks._handshake import handshake
from commhooks._hook import comm_hook
from commhooks._scheme import Scheme
from commhooks._state import HookState
from commhooks._wrappers import Cast, DelayedStart, ErrorFeedback
from commhooks.schemes.dense import Dense, Noop
from commhooks.schemes.minmax import MinMax, MinMaxPerChannel
from commhooks.schemes.powersgd import BatchedPowerSGD, PowerSGD, payload_numel

__all__ = [
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
_Future = torch.futures.Future[torch.Tensor]
_Group = dist.ProcessGroup | None
_Wires = tuple[torch.dtype, ...]  # what payloads are cast to, innermost first
_HookFunction = Callable[[Any, GradBucket], _Future]
_Launcher = Callable[[Any, GradBucket, _Wires], _Future]


def _cast(scheme: Scheme, wires: _Wires) -> Scheme:
    for dtype in wires:
        scheme = Cast(scheme, dtype)
    return scheme


# ---- whose bucket it is


class _Owner:
    """The model behind some parameters, and what stateless hooks keep for it."""

    def __init__(self, model: DistributedDataParallel | None, parameters: Sequence[Tensor]) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._ids = frozenset(map(id, parameters))
        self._seen: set[tuple[int, ...]] = set()
        self._hooks: dict[tuple[_Group, Scheme], HookState] = {}

    def covers(self, parameters: Sequence[Tensor]) -> bool:
        """Whether all ``parameters`` are this model's."""
        key = tuple(map(id, parameters))
        if key not in self._seen:
            if not self._ids.issuperset(key):
                return False
            self._seen.add(key)
        return True

    def extends(self, other: "_Owner") -> bool:
        """Whether this is ``other``'s model with more parameters, wrapped anew to train them."""
        return self is not other and self._ids.issuperset(other._ids)

    def make(
        self, scheme: Scheme, group: _Group, parameters: Sequence[Tensor], **options: Any
    ) -> HookState:
        """A new state on this model."""
        model = self._model() if self._model is not None else None
        if model is None:  # wrapped anew since
            model = _find_model(parameters)
        return HookState(scheme, model, process_group=group, **options)

    def hook(self, scheme: Scheme, group: _Group, bucket: GradBucket) -> HookState:
        """The one state of ``scheme`` over ``group`` on this model."""
        state = self._hooks.get((group, scheme))
        if state is None:
            state = self._hooks[group, scheme] = self.make(scheme, group, bucket.parameters())
        return state


# By parameter, newest owner first: models may share parameters, or be wrapped anew.
_owners: MutableMapping[Tensor, list[_Owner]] = WeakTensorKeyDictionary()


def _owner_of(parameters: Sequence[Tensor]) -> _Owner:
    for owner in _owners.get(parameters[0], ()):
        if owner.covers(parameters):
            return owner
    model = _find_model(parameters)
    everything = list(parameters)
    if model is not None:
        everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    owner = _Owner(model, everything)
    for parameter in everything:
        _owners.setdefault(parameter, []).insert(0, owner)
    return owner


def _find_model(parameters: Sequence[Tensor]) -> DistributedDataParallel | None:
    """The model with these parameters, one with a hook rather than one without.

    torch tells a hook its parameters but not its model. Looked up once per model.
    """
    wanted = set(map(id, parameters))
    found: DistributedDataParallel | None = None
    for model in _models():
        if wanted.issubset(map(id, model.parameters())):
            found = model
            if model._comm_hooks:
                break
    return found


def _models() -> Iterator[DistributedDataParallel]:
    """All there are in this process. By type: ``isinstance`` would run properties of strangers."""
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), DistributedDataParallel):
            continue
        if hasattr(candidate, "module") and hasattr(candidate, "_comm_hooks"):  # is complete
            yield candidate


# ---- what makes a function a classic hook


class _Classic(NamedTuple):
    """How a classic hook launches a bucket; what the wrappers wrap."""

    launch: _Launcher
    wires: _Wires = ()


_classics: MutableMapping[Callable[..., Any], _Classic] = weakref.WeakKeyDictionary()


def _classic(launch: _Launcher) -> Callable[[Callable[P, _Future]], Callable[P, _Future]]:
    """Registers a hook with its launcher, and lets it refuse callers that are not DDP."""

    def decorate(function: Callable[P, _Future]) -> Callable[P, _Future]:
        @functools.wraps(function)
        def hook(*args: P.args, **kwargs: P.kwargs) -> _Future:
            _check_caller(hook.__name__, args)
            return function(*args, **kwargs)

        _classics[hook] = _Classic(launch)
        return hook

    return decorate


def _check_caller(name: str, args: tuple[object, ...]) -> None:
    """FSDP calls with tensors, the Python reducer with a tuple; neither can be served."""
    given = args[1] if len(args) > 1 else None
    if isinstance(given, Tensor):
        raise RegistrationError(
            f"{name} is a hook for DistributedDataParallel, and was called with a tensor in place "
            f"of a bucket, as FSDP does: a sharded model reduces its gradients itself; wrap it in "
            f"DistributedDataParallel instead"
        )
    if isinstance(given, tuple):
        raise HookNotAttachedError(
            f"{name} got a (gradient, parameter) tuple in place of a bucket, as with "
            f"torch._dynamo.config.optimize_ddp = 'python_reducer', which ignores what hooks "
            f"return. Set optimize_ddp = True (the default), which keeps buckets"
        )


def _launch_on_group(scheme: Scheme, group: _Group, bucket: GradBucket, wires: _Wires) -> _Future:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"this hook takes a process group, or None for the model's own, as state; "
            f"got {type(group).__name__}"
        )
    scheme = _cast(scheme, wires) if wires else scheme
    return _owner_of(bucket.parameters()).hook(scheme, group, bucket).launch(bucket)


# ---- hooks without a state of their own


_DENSE, _NOOP, _MINMAX = Dense(), Noop(), MinMax()
_FP16, _BF16 = Cast(Dense(), torch.float16), Cast(Dense(), torch.bfloat16)


@_classic(functools.partial(_launch_on_group, _DENSE))
def allreduce_hook(process_group: _Group, bucket: GradBucket) -> _Future:
    """Averages a bucket by one all-reduce, bit-equal to a model without a hook.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, allreduce_hook)
    """
    return _launch_on_group(_DENSE, process_group, bucket, ())


@_classic(functools.partial(_launch_on_group, _FP16))
def fp16_compress_hook(process_group: _Group, bucket: GradBucket) -> _Future:
    """Averages a bucket in float16; divides before the cast, warns once when a sum overflows.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, fp16_compress_hook)
    """
    return _launch_on_group(_FP16, process_group, bucket, ())


@_classic(functools.partial(_launch_on_group, _BF16))
def bf16_compress_hook(process_group: _Group, bucket: GradBucket) -> _Future:
    """Averages a bucket in bfloat16, on any backend.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, bf16_compress_hook)
    """
    return _launch_on_group(_BF16, process_group, bucket, ())


# DDP refuses a hook of torch's name on anything but NCCL and XCCL, though Gloo can do it.
bf16_compress_hook.__name__ = "bf16_hook"


def _launch_noop(_: Any, bucket: GradBucket, wires: _Wires) -> _Future:
    return _launch_on_group(_NOOP, None, bucket, wires)


@_classic(_launch_noop)
def noop_hook(_: Any, bucket: GradBucket) -> _Future:
    """Returns the local gradient: for measuring headroom only, the ranks drift apart.

    Example:
        >>> ddp_model.register_comm_hook(None, noop_hook)
    """
    return _launch_noop(_, bucket, ())


@_classic(functools.partial(_launch_on_group, _MINMAX))
def quantization_pertensor_hook(process_group: _Group, bucket: GradBucket) -> _Future:
    """Averages a bucket sent as 256 levels between its minimum and maximum, by one all-gather.

    Args:
        process_group: ranks to average over; None: those of the model.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_pertensor_hook)
    """
    return _launch_on_group(_MINMAX, process_group, bucket, ())


@_classic(functools.partial(_launch_on_group, MinMaxPerChannel()))
def quantization_perchannel_hook(
    process_group: _Group, bucket: GradBucket, bucket_size: int = 512
) -> _Future:
    """Averages a bucket sent as 256 levels per block of ``bucket_size`` entries.

    Args:
        process_group: ranks to average over; None: those of the model.
        bucket_size: entries per block.

    Example:
        >>> ddp_model.register_comm_hook(None, quantization_perchannel_hook)
    """
    return _launch_on_group(MinMaxPerChannel(bucket_size), process_group, bucket, ())


# ---- wrappers


def fp16_compress_wrapper(hook: _HookFunction) -> _HookFunction:
    """A hook that does what ``hook`` does with float16 on the wire; takes the state of ``hook``.

    Of a hook of this module the payloads are cast, and residuals stay in float32. Any other hook
    is handed a bucket in float16, and its result is cast back.

    Example:
        >>> state = PowerSGDState(None, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))
    """
    return _wrap(hook, torch.float16, "fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: _HookFunction) -> _HookFunction:
    """A hook that does what ``hook`` does with bfloat16 on the wire; takes the state of ``hook``.

    See :func:`fp16_compress_wrapper`; works on any backend.

    Example:
        >>> state = PowerSGDState(None, start_powerSGD_iter=10)
        >>> ddp_model.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))
    """
    # Not torch's name, which DDP refuses on anything but NCCL and XCCL.
    return _wrap(hook, torch.bfloat16, "bf16_wrapper_hook")


def _wrap(hook: _HookFunction, dtype: torch.dtype, name: str) -> _HookFunction:
    if hook is comm_hook:
        raise TypeError(
            f"{name}: comm_hook casts by its scheme; use commhooks.register(model, ..., "
            f"wire_dtype={str(dtype).removeprefix('torch.')!r}) or commhooks.Cast"
        )
    inner = _classics.get(hook)
    wrapped = _wrap_foreign(hook, dtype) if inner is None else _wrap_classic(inner, dtype)
    wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped


def _wrap_classic(inner: _Classic, dtype: torch.dtype) -> _HookFunction:
    wires = (*inner.wires, dtype)

    def wrapped(hook_state: Any, bucket: GradBucket) -> _Future:
        return inner.launch(hook_state, bucket, wires)

    hook = _classic(inner.launch)(wrapped)
    _classics[hook] = _Classic(inner.launch, wires)
    return hook


def _wrap_foreign(hook: _HookFunction, dtype: torch.dtype) -> _HookFunction:
    def wrapped(hook_state: Any, bucket: GradBucket) -> _Future:
        original = bucket.buffer()
        bucket.set_buffer(original.to(dtype))

        def restore(done: torch.futures.Future[Any]) -> Tensor:
            value = done.value()
            result: Tensor = value[0] if isinstance(value, (list, tuple)) else value
            return original.copy_(result)

        return hook(hook_state, bucket).then(restore)

    return wrapped


# ---- PowerSGD


class _Kind(NamedTuple):
    """The layer-wise or the batched variant: its scheme, and the entries it sends for a bucket."""

    scheme: Callable[["PowerSGDState"], Scheme]
    numel: Callable[["PowerSGDState", Sequence[torch.Size]], int]


def _layerwise(state: "PowerSGDState") -> Scheme:
    return PowerSGD(
        rank=state.matrix_approximation_rank,
        min_compression_rate=state.min_compression_rate,
        warm_start=state.warm_start,
        batch_same_shape=state.batch_tensors_with_same_shape,
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
        batch_tensors_with_same_shape: computes matrices of equal shape together.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)
    """

    def __init__(
        self,
        process_group: _Group,
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
        self._inners: weakref.WeakKeyDictionary[_Owner, _Inner] = weakref.WeakKeyDictionary()
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

    def _scheme(self, kind: _Kind, wires: _Wires) -> Scheme:
        scheme = kind.scheme(self)
        if self.use_error_feedback:
            scheme = ErrorFeedback(scheme)
        return _cast(DelayedStart(scheme, self.start_powerSGD_iter), wires)

    def _settings(self, kind: _Kind, wires: _Wires) -> tuple[Any, ...]:
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

    def _launch(self, kind: _Kind, bucket: GradBucket, wires: _Wires) -> _Future:
        parameters = bucket.parameters()
        inner = self._inner(_owner_of(parameters), parameters, kind, wires)
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
        self, owner: _Owner, parameters: Sequence[Tensor], kind: _Kind, wires: _Wires
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
        for model in _models():
            for hook, state in model._comm_hooks:
                classic = _classics.get(hook)
                if state is not self or classic is None or classic.launch not in _kinds:
                    continue
                parameters = [one for one in model.parameters() if one.requires_grad]
                kind = _kinds[classic.launch]
                inner = self._inner(_owner_of(parameters), parameters, kind, classic.wires)
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
    kind: _Kind, state: PowerSGDState, bucket: GradBucket, wires: _Wires
) -> _Future:
    if not isinstance(state, PowerSGDState):
        raise TypeError(
            f"the PowerSGD hooks take a commhooks.PowerSGDState as state, got "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state._launch(kind, bucket, wires)


_launch_layerwise = functools.partial(_launch_powersgd, _LAYERWISE)
_launch_batched = functools.partial(_launch_powersgd, _BATCHED)
_kinds: dict[_Launcher, _Kind] = {_launch_layerwise: _LAYERWISE, _launch_batched: _BATCHED}


@_classic(_launch_layerwise)
def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> _Future:
    """Averages a bucket by PowerSGD, each matrix of it as two thin factors.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, powerSGD_hook)

    Reference: Vogels, Karimireddy and Jaggi, PowerSGD, 2019.
    """
    return _launch_layerwise(state, bucket, ())


@_classic(_launch_batched)
def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> _Future:
    """Averages a bucket by PowerSGD on the whole of it as one square matrix.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, batched_powerSGD_hook)
    """
    return _launch_batched(state, bucket, ())


# ---- post-local SGD


class PostLocalSGDState:
    """Settings of ``post_localSGD_hook``: a global average first, later one in subgroups only.

    Use it with a model averager, e.g. torch's ``PeriodicModelAverager``, which averages the
    parameters globally every so many steps.

    Args:
        process_group: ranks of the first steps; None: those of the model.
        subgroup: ranks of the later steps; None: those of ``process_group`` on the same host,
            settled in the first local step.
        start_localSGD_iter: number of global steps first.
        post_local_gradient_allreduce: average in the subgroup afterwards; else not at all.

    Example:
        >>> state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, post_localSGD_hook)

    Reference: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2020.
    """

    def __init__(
        self,
        process_group: _Group,
        subgroup: _Group,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self._first_iter = 0
        self._iters: weakref.WeakKeyDictionary[_Owner, int] = weakref.WeakKeyDictionary()

    @property
    def iter(self) -> int:
        """Global steps so far; it stops counting at ``start_localSGD_iter``."""
        return max(self._iters.values(), default=self._first_iter)

    @iter.setter
    def iter(self, value: int) -> None:
        self._first_iter = value
        self._iters.clear()

    def _launch(self, bucket: GradBucket, wires: _Wires) -> _Future:
        owner = _owner_of(bucket.parameters())
        if owner not in self._iters:
            smaller = [count for other, count in self._iters.items() if owner.extends(other)]
            self._iters[owner] = max(smaller, default=self._first_iter)
        step = self._iters[owner]
        group, scheme = self.process_group, _cast(_DENSE, wires)
        if step < self.start_localSGD_iter:
            if bucket.is_last():
                self._iters[owner] = step + 1
        elif not self.post_local_gradient_allreduce:
            scheme = _NOOP
        else:
            if self.subgroup is None:
                whole = owner.hook(scheme, group, bucket)._group()
                self.subgroup = _same_host_group(whole)
            group = self.subgroup
        return owner.hook(scheme, group, bucket).launch(bucket)


def _same_host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks of ``group`` on this host; all ranks of ``group`` call it together."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    ranks = dist.get_process_group_ranks(group)
    mine = [rank for rank, host in zip(ranks, hosts, strict=True) if host == hosts[group.rank()]]
    made: dist.ProcessGroup = dist.new_group(mine, use_local_synchronization=True)
    return made


def _launch_local_sgd(state: PostLocalSGDState, bucket: GradBucket, wires: _Wires) -> _Future:
    if not isinstance(state, PostLocalSGDState):
        raise TypeError(
            f"post_localSGD_hook takes a commhooks.PostLocalSGDState as state, got "
            f"{type(state).__module__}.{type(state).__qualname__}"
        )
    return state._launch(bucket, wires)


@_classic(_launch_local_sgd)
def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> _Future:
    """Averages a bucket over all ranks in the first steps, over a subgroup or not at all later.

    Example:
        >>> state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        >>> ddp_model.register_comm_hook(state, post_localSGD_hook)
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> averager.average_parameters(ddp_model.parameters())  # after each optimizer.step()
    """
    return _launch_local_sgd(state, bucket, ())
