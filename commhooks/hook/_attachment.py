"""Raises or warns while a model trains if its hook would not run, or would miss gradients."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import comm_hooks, wrapped_parameters
from commhooks.core._names import plain_name
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook._parameters import not_reduced, reduced
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core._torch import dynamo_disable, in_join, local_spec_of
from ddp_core.exchange._errors import listed
from ddp_core.reducer._autograd import (
    NO_BACKWARD,
    backward_number,
    call_after_backward,
    is_nested,
    when_accumulated,
)
from ddp_core.reducer._known import KnownParameters, Structure, has_another_wrapper
from ddp_core.reducer._misuse import local_error, twice_error
from ddp_core.reducer._optimizer import before_every_step

__all__ = [
    "AttachmentGuard",
    "CallMonitor",
    "ForwardGuard",
    "HostGuard",
    "ShardedModelGuard",
    "UnfrozenParameters",
    "known_parameters",
]

_ADVICE = (
    "Was it registered (commhooks.register(model, ...), or model.register_comm_hook(state, "
    "commhooks.comm_hook)), and is the loss computed through the DistributedDataParallel? "
    "Lightning's DDPStrategy(ddp_comm_hook=...) registers on CUDA only"
)
_IS_TRAINED, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
# Each observed parameter costs a call in every backward pass. They are spread over the model, so
# that a part of the model that trains alone has some of them.
_MAX_OBSERVED = 16


class CallMonitor:
    """Counts the calls of a hook, and detects gradients that never reached the hook.

    torch's reducer does not report what it does with a gradient, so some gradients are observed:
    the hook has to be called with a bucket after them, in the same backward pass. ``ddp_core``
    checks that itself. A state that was never called warns when it is deleted.

    Attributes:
        calls: number of calls of the hook, each with a bucket.
        suppressed: whether the warning is off, since the state was used otherwise (saved, say).
        is_guarded: whether a forward pre-hook records forward passes here.
        knows_model: whether gradients of a model are observed.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.suppressed = False
        self.knows_model = self._trained = self.is_guarded = False
        self._handles: list[Any] = []
        self._names: dict[int, str] = {}  # of the observed parameters, by index in the model
        self._seen: set[int] = set()
        self._model: weakref.ref[Any] | None = None
        self._latest: tuple[int, Tensor | None] = (0, None)  # the latest observed gradient
        self._calls_at_gradient = -1  # `calls` at the latest observed gradient; -1: there was none
        self._observed_in = NO_BACKWARD  # backward pass of the latest observed gradient
        # In that pass: whether its gradients train this hook's model, and whether a bucket has to
        # follow them.
        self._is_training = self._bucket_must_follow = False
        # A forward pass outside of no_sync was made, and its last bucket has not come.
        self._awaits_last_bucket = False
        self._is_local = False  # the latest forward pass was within no_sync
        # Raised if no bucket comes after all: a reentrant pass had a gradient after the last one.
        self._pending_error: str | None = None
        self._calls_at_forward, self._last_pass_lacked_call = 0, False

    def warn_at_exit(self, state: object, name: str, advice: str = _ADVICE) -> None:
        """Warns when ``state`` is deleted, or at exit, if it was never called.

        Args:
            state: the state of the hook.
            name: name of the state in the warning.
            advice: possible causes, for the warning.
        """
        # A finalizer also runs at exit. It must not hold the state, which would never be deleted.
        weakref.finalize(state, self._warn_if_not_called, name, advice)

    def observe(
        self,
        state: object,
        model: DistributedDataParallel,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Observes gradients of ``model``: always on torch's DDP, else until the first call.

        Args:
            parameters: the parameters in the model's buckets, by name; None: by the model's names.
        """
        self.knows_model, self._model = True, weakref.ref(model)
        candidates = list((reduced(model) if parameters is None else parameters).items())
        indices = sorted(
            {*range(0, len(candidates), len(candidates) // _MAX_OBSERVED + 1), len(candidates) - 1}
            - {-1}
        )
        callback = partial(self._on_gradient, weakref.ref(state), self._model)
        for index in indices:
            self._names[index], parameter = candidates[index]
            # Not called for torch.autograd.grad, which accumulates nothing.
            hook = partial(callback, index)
            self._handles.append(when_accumulated(parameter, hook))

    def disable(self) -> None:
        """Turns the warning off, for a state that need not run in a backward pass."""
        self.knows_model, self.suppressed = False, True
        self._stop()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- events

    def record_call(self, *, is_last: bool) -> None:
        """Records a call of the hook; ``is_last``: with the last bucket of a step."""
        self.calls += 1
        self._pending_error = None
        if is_last:
            self._awaits_last_bucket = False

    def forward_begins(self, *, synchronises: bool) -> None:
        """Records a forward pass of the wrapper that builds an autograd graph.

        Raises:
            HookNotAttachedError: two passes produced gradients and no call of the hook, or one pass
                produced a gradient twice.
        """
        if self._pending_error is not None:
            text, self._pending_error = self._pending_error, None
            raise HookNotAttachedError(text)
        self.is_guarded, self._is_local = True, not synchronises
        if not synchronises:
            return
        lacked_call = self._calls_at_gradient == self._calls_at_forward == self.calls
        # After one such pass, torch's DDP may be about to raise that parameters were unused.
        if lacked_call and self._last_pass_lacked_call:
            raise HookNotAttachedError(
                "two backward passes have brought gradients, and the registered hook was not "
                "called: the reducer of this DistributedDataParallel does not have it. Wrap the "
                "module again, and register the hook again"
            )
        self._last_pass_lacked_call, self._calls_at_forward = lacked_call, self.calls
        self._awaits_last_bucket, self._calls_at_gradient = True, -1

    def _on_gradient(self, state: Any, model: Any, place: int, parameter: Tensor) -> None:
        """Records a gradient of an observed parameter."""
        number = backward_number()
        if self._observed_in != number:
            self._pass_begins(state(), model())
            self._observed_in = number
        # After two backward passes without a call the model was trained without the hook. In the
        # first one the call may still come, since a bucket is launched after its gradients.
        if self._is_training and not self.calls:
            self._trained |= place in self._seen
            self._seen.add(place)
        if self._bucket_must_follow:
            self._latest, self._calls_at_gradient = (place, parameter), self.calls

    def _pass_begins(self, state: object, ddp: Any) -> None:
        """Sets what is constant in a backward pass, at its first observed gradient."""
        self._is_training = self._bucket_must_follow = False
        if ddp is None or not ddp.require_backward_grad_sync:
            return
        # The registered state may be another object that calls this one (torchft).
        registered = [hook[1] for hook in comm_hooks(ddp)]
        self._is_training = all(
            getattr(holder, "hook_state", holder) is state for holder in registered
        )
        if isinstance(ddp, CoreDDP):
            if self.calls or self._trained:
                self._stop()
        elif registered and self._is_training:
            self._bucket_must_follow = True
            call_after_backward(self._pass_ended)

    def _pass_ended(self) -> None:
        """Raises if no bucket followed the latest observed gradient of a backward pass."""
        (place, parameter), self._latest = self._latest, (0, None)
        self._observed_in = NO_BACKWARD
        if parameter is None:  # a reentrant pass has checked
            return
        if self.calls != self._calls_at_gradient or self._awaits_last_bucket or self._is_local:
            return
        model = None if self._model is None else self._model()
        if not self.is_guarded or model is None or has_another_wrapper(model, parameter):
            return
        if is_nested():  # a trainer may have begun another step without a forward pass
            self._pending_error = twice_error(self._names[place], place)
            return
        raise HookNotAttachedError(local_error(self._names[place], landed=self.calls > 0))

    def _warn_if_not_called(self, name: str, advice: str) -> None:
        # With a model: warn if the model was trained. Without: a state that was neither called nor
        # used otherwise deserves a warning only where there are other ranks to average with.
        if self.calls or (not self._trained if self.knows_model else self.suppressed):
            return
        if not self.knows_model and not _is_distributed():
            return
        trained = ", though its model was trained" if self._trained else ""
        warnings.warn(
            f"{name} was never called{trained}: no gradient was averaged by it. {advice}",
            RuntimeWarning,
            stacklevel=1,
        )


def _is_distributed() -> bool:
    """Whether this process takes, or took, part in distributed training."""
    # At exit the process group may be destroyed already; torchrun's variable is still there.
    if dist.is_available() and dist.is_initialized():
        return True
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


class UnfrozenParameters:
    """Warns of parameters that were unfrozen after DistributedDataParallel was made.

    Args:
        not_reduced: parameters that are in no bucket, by name.
    """

    def __init__(self, not_reduced: dict[str, nn.Parameter]) -> None:
        self._not_reduced = not_reduced

    def warn(self) -> None:
        """Warns once if a parameter that is in no bucket is trained."""
        # Called in every forward pass, so without a loop in Python.
        if not any(map(_IS_TRAINED, self._not_reduced.values())):
            return
        names = [name for name, value in self._not_reduced.items() if value.requires_grad]
        self._not_reduced = {}
        warnings.warn(
            f"{listed(names)} did not require a gradient when DistributedDataParallel was made, "
            f"and now does: it is in no bucket, so its gradient is not averaged, and it drifts "
            f"apart. Wrap the module again after unfreezing, or freeze after wrapping "
            f"(with find_unused_parameters=True)",
            RuntimeWarning,
            stacklevel=4,
        )


def known_parameters(owner: nn.Module, ddp: Any, prefix: str = "module.") -> KnownParameters:
    """Returns the check that a model of torch's DDP still trains the same parameters.

    Args:
        owner: the module that is called.
        ddp: the DistributedDataParallel that reduces its gradients.
        prefix: prefix of parameter names in the owner.
    """
    reduced_ids = set(map(id, reduced(ddp).values()))
    named = {name.removeprefix(prefix): parameter for name, parameter in owner.named_parameters()}
    # torch's DDP lists frozen parameters among its own, but not ignored ones.
    ignored = [parameter for name, parameter in named.items() if name in ddp.parameters_to_ignore]
    return KnownParameters(
        owner,
        {name: parameter for name, parameter in named.items() if id(parameter) in reduced_ids},
        ignored=ddp.parameters_to_ignore,
        first=[*wrapped_parameters(ddp), *ignored],
        prefix=prefix,
        # With tensor parallelism, torch's DDP removes parameters from the model.
        may_lack=ddp.find_unused_parameters
        or ddp.static_graph
        or any(local_spec_of(parameter) is not None for parameter in reduced(ddp).values()),
        watches_nodes=ddp.mixed_precision is None,
        kind=HookNotAttachedError,
    )


class ForwardGuard:
    """Checks before each forward pass that the hook will run; a copied guard does nothing.

    A model that is copied or pickled takes its pre-hooks along.
    """

    _is_copy = False

    # Not traced by torch.compile: it acts on state that changes from step to step.
    @dynamo_disable
    def __call__(self, module: Any, inputs: Any) -> None:
        if torch.is_grad_enabled() and not self._is_copy:
            self.pass_begins(module)

    def pass_begins(self, module: Any) -> None:
        """Checks before a forward pass that builds an autograd graph."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_is_copy": True}


class AttachmentGuard(ForwardGuard):
    """Raises before a forward pass of DistributedDataParallel if the hook would not run."""

    def __init__(self, state: Any, ddp: DistributedDataParallel) -> None:
        self._state = state
        # Weak: the module holds its pre-hooks, and no cycle should keep a model alive.
        self._ddp: weakref.ref[nn.Module] | None = weakref.ref(ddp)
        self._unfrozen = UnfrozenParameters(not_reduced(ddp))
        # ``ddp_core`` checks this itself.
        is_core = isinstance(ddp, CoreDDP)
        self._known: KnownParameters | None = None if is_core else known_parameters(ddp, ddp)
        state.call_monitor.is_guarded = True

    def attached_to(self, module: nn.Module) -> bool:
        """Whether ``module`` is the one the hook was registered on, in this process."""
        return self._ddp is not None and self._ddp() is module

    def pass_begins(self, module: Any) -> None:
        if not self.attached_to(module):
            if not module.training:  # an average of weights, say (AveragedModel)
                return
            raise HookNotAttachedError(
                "this DistributedDataParallel was unpickled or copied: it lists a communication "
                "hook that its reducer does not have, so gradients would be averaged without it. "
                "Call commhooks.register(model, ...) on it, then load_state_dict; an average of "
                "weights is evaluated after eval(), or under torch.no_grad()"
            )
        self._check_join(module)
        if self._known is not None:
            self._known.check()
            self._state.call_monitor.forward_begins(synchronises=module.require_backward_grad_sync)
        self._state.forward_begins()
        self._unfrozen.warn()

    def _check_join(self, module: Any) -> None:
        """Raises if within ``join`` the hook could not know which gradients torch's DDP writes.

        Also where messages of verification would meet torch's map of them on another rank: a rank
        without inputs sends them before the map, and one in a backward pass behind it.
        """
        if isinstance(module, CoreDDP) or not (in_join(module) and module.find_unused_parameters):
            return
        verification = self._state.verification
        call = "DistributedDataParallel.join with find_unused_parameters=True"
        if verification is not None and verification.shares_group:
            raise RegistrationError(
                f"{call} and verify=... on a GPU: a rank without inputs would send what is "
                f"compared in another order. Use ddp_core.DistributedDataParallel (same "
                f"arguments), find_unused_parameters=False, or leave out verify"
            )
        if self._state.engine.keeps_memory:
            raise RegistrationError(
                f"{call} and {self._state.scheme}, which keeps state: a rank without inputs does "
                f"not learn which parameters no rank has used, and would count what it keeps of "
                f"them as sent. Use ddp_core.DistributedDataParallel (same arguments), which "
                f"notifies it, or find_unused_parameters=False"
            )

    # A copy or a pickle does not know its module: ``attached_to`` is then False, as it should be,
    # since the copied DistributedDataParallel has a reducer without the hook.
    def __getstate__(self) -> dict[str, Any]:
        return {"state": self._state}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._state, self._ddp, self._known = saved["state"], None, None
        self._unfrozen = UnfrozenParameters({})


class ShardedModelGuard:
    """Raises if the parameters of a model that a host (FSDP) shards were replaced or converted.

    A host adopts the parameters of ``load_state_dict(assign=True)``, so their gradients are
    averaged; but an optimizer that was made before holds the old ones, and trains nothing. And a
    host keeps buffers of its own for unsharded parameters, which ``.double()`` does not convert.

    Args:
        model: held weakly.
        held: returns parameters that the host has taken out of the model for a while.
    """

    def __init__(self, model: nn.Module, held: Callable[[nn.Module], Iterable[Tensor]]) -> None:
        self._model, self._held = weakref.ref(model), held
        self._structure = Structure(model)
        # Not weakly: torch does not swap a tensor that has weak references (``to_empty``).
        self._tensors: dict[int, Tensor] = {}
        self._removed: list[weakref.ref[Tensor]] = []  # tensors that an optimizer may still hold
        self._remember(model)
        before_every_step(self._optimizer_steps)

    def _present(self, model: nn.Module) -> dict[int, Tensor]:
        return {id(tensor): tensor for tensor in (*model.parameters(), *self._held(model))}

    def _remember(self, model: nn.Module) -> None:
        self._tensors = self._present(model)
        self._dtypes = list(map(_DTYPE, self._tensors.values()))
        self._structure.record(model)

    def check(self) -> None:
        """Raises before a forward pass if the dtype of parameters has changed."""
        dtypes = list(map(_DTYPE, self._tensors.values()))
        if dtypes == self._dtypes:
            return
        now, before = next(
            pair for pair in zip(dtypes, self._dtypes, strict=True) if len({*pair}) > 1
        )
        raise HookNotAttachedError(
            f"commhooks: parameters are of {now}, and were of {before} when the model was sharded: "
            f"FSDP keeps buffers of the old dtype. Convert the model before it is sharded, or give "
            f"FSDP the dtype (MixedPrecisionPolicy, MixedPrecision), and register its hook again"
        )

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if an optimizer has a parameter that the model no longer has."""
        model = self._model()
        if model is None:
            return
        if self._structure.has_changed:
            before = self._tensors.values()
            self._remember(model)
            self._removed += [
                weakref.ref(tensor) for tensor in before if id(tensor) not in self._tensors
            ]
        if not self._removed:
            return
        # Some are deleted with their optimizer, and some may be back in the model.
        self._removed = [
            reference
            for reference in self._removed
            if reference() is not None and id(reference()) not in self._tensors
        ]
        removed = {id(reference()) for reference in self._removed}
        if any(
            id(parameter) in removed
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise HookNotAttachedError(
                f"{type(optimizer).__name__}.step: the model has other parameters than the "
                f"optimizer (load_state_dict(assign=True), a new layer), which would train "
                f"nothing: make the optimizer again, and load its state"
            )


class HostGuard(ForwardGuard):
    """Reports forward passes to a hook; raises if the hook would not run.

    Args:
        model: the model that the host shards.
        hook: the hook that the host runs.
        units: the modules whose gradients the host reduces together, by name; all have the hook.
        present: returns the units that a model has now.
        has_hook: whether a unit still has the hook.
        check_ready: raises if the last backward pass raised, and the host cannot begin another.
        held: returns parameters that the host has taken out of the model for a while.
    """

    def __init__(
        self,
        model: nn.Module,
        hook: Any,
        units: Mapping[str, Any],
        present: Callable[[nn.Module], Mapping[str, Any]],
        has_hook: Callable[[Any], bool],
        check_ready: Callable[[], None],
        held: Callable[[nn.Module], Iterable[Tensor]],
    ) -> None:
        self._parameters = ShardedModelGuard(model, held)
        self._hook, self._units = hook, dict(units)
        self._present, self._has_hook, self._check_ready = present, has_hook, check_ready
        self._rescans = True

    def pass_begins(self, module: nn.Module) -> None:
        self._parameters.check()
        units = self._units
        if (
            self._rescans
        ):  # until all have the hook once: after that a host shards no further modules
            units = {**units, **self._present(module)}
        lost = [
            plain_name(name) or "root" for name, unit in units.items() if not self._has_hook(unit)
        ]
        if lost:
            raise HookNotAttachedError(
                f"commhooks: {self._hook} would not run on {listed(lost)}: sharded after register, "
                f"or given another reduction since (set_custom_reduce_scatter, set_all_reduce_hook"
                f", another hook). Call register after the last fully_shard, and set no other "
                f"reduction afterwards"
            )
        self._rescans = False
        # Activation checkpointing runs forward passes within backward.
        if backward_number() == NO_BACKWARD:
            self._check_ready()
        self._hook.forward_begins()
