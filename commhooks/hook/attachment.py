"""``AttachmentGuard``: raises at a forward pass where the registered hook would not run."""

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
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = ["AttachmentGuard"]

_IS_TRAINED = attrgetter("requires_grad")


class AttachmentGuard:
    """Forward pre-hook that raises where the registered hook would silently not run."""

    def __init__(self, state: Running, ddp: DistributedDataParallel) -> None:
        self._state = state
        self._ddp: weakref.ref[nn.Module] | None = weakref.ref(ddp)
        self._had_grad = _has_gradients(ddp)
        self._accumulates = False
        self._not_reduced = not_reduced(ddp)

    def attached_to(self, module: nn.Module) -> bool:
        """Whether ``module`` is the one the hook was registered on, in this process."""
        return self._ddp is not None and self._ddp() is module

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined]
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
            self._look_for_unfrozen()
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
        joins = module._join_config.enable and module.find_unused_parameters
        if joins and self._state._engine.keeps_memory and not isinstance(module, CoreDDP):
            raise RegistrationError(
                f"DistributedDataParallel.join with find_unused_parameters=True and "
                f"{self._state.scheme}, which has memory: a rank without inputs is not told which "
                f"parameters no rank has used, and would count what it keeps of them as sent. Use "
                f"ddp_core.DistributedDataParallel (same arguments), which tells it, or "
                f"find_unused_parameters=False"
            )

    def _look_for_unfrozen(self) -> None:
        """Warns, once, if a parameter is trained that DistributedDataParallel does not know."""
        if not any(map(_IS_TRAINED, self._not_reduced.values())):
            return
        found = [name for name, one in self._not_reduced.items() if one.requires_grad]
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" * (len(found) > 3))
        self._not_reduced = {}
        warnings.warn(
            f"{listed} did not require a gradient when DistributedDataParallel was made, and "
            f"now does: it is in no bucket, so it is averaged by nobody and drifts apart "
            f"between ranks. Wrap the module anew after unfreezing, or freeze after wrapping "
            f"(with find_unused_parameters=True)",
            RuntimeWarning,
            stacklevel=3,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self._state}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._state, self._ddp = saved["state"], None
        self._had_grad = self._accumulates = False
        self._not_reduced = {}


def _has_gradients(ddp: Any) -> bool:
    """Whether a parameter that the hook averages has a gradient."""
    ignored = ddp.parameters_to_ignore
    return any(
        parameter.grad is not None
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored
    )
