"""Notices a hook that does not run: at a forward pass where it is sure, else when all is over."""

from __future__ import annotations

import os
import warnings
import weakref
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.parameters import not_reduced
from ddp_core import DistributedDataParallel as CoreDDP

if TYPE_CHECKING:
    from commhooks.hook.state import HookState

__all__ = ["AttachmentGuard", "Attendance"]

_IS_TRAINED = attrgetter("requires_grad")


class Attendance:
    """What became of a hook's state; outlives it, to say so if it was made and never called.

    Attributes:
        calls: buckets that came to the hook.
        excused: it was asked for something else than to run.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.excused = False
        self._knows_model = self._trained = False
        self._handles: list[Any] = []
        self._seen: set[int] = set()

    def report_at_the_end_of(self, state: HookState, what: str) -> None:
        """Warns when ``state`` is dropped, or the interpreter ends, if it was never called."""
        weakref.finalize(state, self._end, what)

    def watch(self, state: HookState, model: DistributedDataParallel) -> None:
        """Looks, until the hook is called, whether the model trains without it."""
        self._knows_model = True
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        looks = partial(self._look, weakref.ref(state), weakref.ref(model))
        # Two will do: gradients of a whole model would be many calls.
        for place, parameter in enumerate([*trained[:1], *trained[1:][-1:]]):
            self._handles.append(parameter.register_hook(partial(looks, place)))

    def dismiss(self) -> None:
        """Nobody is told: the state need not run in a backward pass."""
        self._knows_model, self.excused = False, True
        for handle in self._handles:
            handle.remove()

    def _look(self, state: Any, model: Any, place: int, _: Tensor) -> None:
        """A gradient has come; a parameter's second one is of another backward pass."""
        ddp = model()
        others = [hook for hook in getattr(ddp, "_comm_hooks", ()) if hook[1] is not state()]
        if not self.calls and not others and getattr(ddp, "require_backward_grad_sync", False):
            self._trained |= place in self._seen
            self._seen.add(place)
        if self.calls or self._trained:
            for handle in self._handles:
                handle.remove()

    def _end(self, what: str) -> None:
        if self.calls or (not self._trained if self._knows_model else self.excused):
            return
        if not self._knows_model and not _is_one_of_several():
            return
        trained = ", though its model was trained" if self._trained else ""
        warnings.warn(
            f"{what} was never called{trained}: no gradient was averaged by it. Was it registered "
            f"(commhooks.register(model, ...), or model.register_comm_hook(state, "
            f"commhooks.comm_hook)), and is the loss computed through the DistributedDataParallel? "
            f"Lightning's DDPStrategy(ddp_comm_hook=...) registers on CUDA only",
            RuntimeWarning,
            stacklevel=1,
        )


def _is_one_of_several() -> bool:
    """Whether this process takes, or took, part in distributed training."""
    if dist.is_available() and dist.is_initialized():
        return True
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


class AttachmentGuard:
    """Forward pre-hook that raises where the registered hook would silently not run."""

    def __init__(self, state: HookState, ddp: DistributedDataParallel) -> None:
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
