"""Defines ``AttachmentGuard``, which raises in a forward pass if the hook would not run."""

from __future__ import annotations

import warnings
import weakref
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.parameters import not_reduced
from commhooks.hook.running import Running
from commhooks.hook.tracing import not_traced
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core._torch import in_join

__all__ = ["AttachmentGuard", "Unfrozen"]

_IS_TRAINED = attrgetter("requires_grad")


class Unfrozen:
    """Warns of parameters that were frozen when DistributedDataParallel was made, and are no more.

    Args:
        not_reduced: those that are in no bucket, by name.
    """

    def __init__(self, not_reduced: dict[str, nn.Parameter]) -> None:
        self._not_reduced = not_reduced

    def warn(self) -> None:
        """Warns once if one of them is trained."""
        # In every forward pass, so without a loop in Python.
        if not any(map(_IS_TRAINED, self._not_reduced.values())):
            return
        names = [name for name, value in self._not_reduced.items() if value.requires_grad]
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
        self._not_reduced = {}
        warnings.warn(
            f"{listed} did not require a gradient when DistributedDataParallel was made, and "
            f"now does: it is in no bucket, so it is averaged by nobody and drifts apart "
            f"between ranks. Wrap the module again after unfreezing, or freeze after wrapping "
            f"(with find_unused_parameters=True)",
            RuntimeWarning,
            stacklevel=4,
        )


class AttachmentGuard:
    """Raises, as a forward pre-hook, if the registered hook would not run."""

    def __init__(self, state: Running, ddp: DistributedDataParallel) -> None:
        self._state = state
        # Weak: the module holds its pre-hooks, and no cycle should keep a model alive.
        self._ddp: weakref.ref[nn.Module] | None = weakref.ref(ddp)
        self._had_grad = _has_gradients(ddp)
        self._accumulates = False
        self._unfrozen = Unfrozen(not_reduced(ddp))

    def attached_to(self, module: nn.Module) -> bool:
        """Whether ``module`` is the one the hook was registered on, in this process."""
        return self._ddp is not None and self._ddp() is module

    # Not traced by torch.compile: it acts on state that changes from step to step.
    @not_traced
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not self.attached_to(module):
            raise HookNotAttachedError(
                "this DistributedDataParallel was unpickled or copied: it lists a communication "
                "hook that its reducer does not have, so gradients would be averaged without it. "
                "Call commhooks.register(model, ...) on it, then load_state_dict"
            )
        if torch.is_grad_enabled():
            self._refuse_guessing(module)
            self._state.forward_begins()
            self._unfrozen.warn()
        # A hook that was called once is attached. Gradients from before ``register`` prove nothing.
        if self._state.calls or self._had_grad:
            return
        if not getattr(module, "require_backward_grad_sync", True):
            self._accumulates = True  # gradients come from no_sync() from now on
        elif not self._accumulates and _has_gradients(module):
            raise HookNotAttachedError(
                "a backward pass made gradients but the registered hook was never called. Is the "
                "loss computed through the wrapped module instead of the DistributedDataParallel?"
            )

    def _refuse_guessing(self, module: Any) -> None:
        """Raises if the hook could not know which gradients torch's class writes."""
        joins = in_join(module) and module.find_unused_parameters
        if joins and self._state._engine.keeps_memory and not isinstance(module, CoreDDP):
            raise RegistrationError(
                f"DistributedDataParallel.join with find_unused_parameters=True and "
                f"{self._state.scheme}, which has memory: a rank without inputs is not told which "
                f"parameters no rank has used, and would count what it keeps of them as sent. Use "
                f"ddp_core.DistributedDataParallel (same arguments), which tells it, or "
                f"find_unused_parameters=False"
            )

    # A copy or a pickle does not know its module: ``attached_to`` is then False, as it should be,
    # since the copied DistributedDataParallel has a reducer without the hook.
    def __getstate__(self) -> dict[str, Any]:
        return {"state": self._state}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._state, self._ddp = saved["state"], None
        self._had_grad = self._accumulates = False
        self._unfrozen = Unfrozen({})


def _has_gradients(ddp: Any) -> bool:
    """Whether a parameter that the hook averages has a gradient."""
    # Delayed parameters, which are ignored, have gradients after every forward pass.
    ignored = ddp.parameters_to_ignore
    return any(
        parameter.grad is not None
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored
    )
