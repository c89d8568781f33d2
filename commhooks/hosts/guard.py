"""Defines ``HostGuard``, which checks before each forward pass that a host still runs the hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from commhooks.core.names import plain_name
from commhooks.errors import HookNotAttachedError
from commhooks.hook.state import HookState
from commhooks.hook.tracing import not_traced
from ddp_core._torch import backward_number

__all__ = ["HostGuard"]


class HostGuard:
    """Tells a hook, as a forward pre-hook, that a pass begins; raises if the hook would not run.

    Args:
        hook: that the host runs.
        units: the parts of the model that the host reduces one by one, by name; all have the hook.
        present: returns those that a model has now.
        has_hook: whether one of them has the hook still.
        need_ready: raises if the host cannot begin a pass, since the one before has raised.
    """

    def __init__(
        self,
        hook: HookState,
        units: Mapping[str, Any],
        present: Callable[[nn.Module], Mapping[str, Any]],
        has_hook: Callable[[Any], bool],
        need_ready: Callable[[], None] | None = None,
    ) -> None:
        self._hook, self._units = hook, dict(units)
        self._present, self._has_hook, self._need_ready = present, has_hook, need_ready
        self._looks = True

    # Not traced by torch.compile: it acts on state that changes from step to step.
    @not_traced
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        units = self._units
        if self._looks:  # once: after its first forward pass a host takes no further modules
            self._looks, units = False, {**units, **self._present(module)}
        lost = [
            plain_name(name) or "root" for name, unit in units.items() if not self._has_hook(unit)
        ]
        if lost:
            raise HookNotAttachedError(
                f"commhooks: {self._hook} would not run on {', '.join(lost[:5])}"
                f"{', ...' * (len(lost) > 5)}: sharded after register, or given another reduction "
                f"since (set_custom_reduce_scatter, set_all_reduce_hook, another hook). Call "
                f"register after the last fully_shard, and set no other reduction afterwards"
            )
        # Activation checkpointing runs forward passes within backward.
        if self._need_ready is not None and backward_number() < 0:
            self._need_ready()
        self._hook.forward_begins()
