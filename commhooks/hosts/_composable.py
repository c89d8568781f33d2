"""Registers a scheme on a module of ``torch.distributed._composable.replicate``.

``replicate`` makes a DistributedDataParallel in the first forward pass, over a list of parameters
without names, and takes hooks until then.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from commhooks._torch import (
    comm_hooks,
    composable_ddp,
    composable_hooks,
    composable_options,
    replicate,
)
from commhooks.core._names import plain_names
from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook._attachment import ForwardGuard, UnfrozenParameters, known_parameters
from commhooks.hook._handshake import HANDSHAKE_LIMIT
from commhooks.hook._hook_function import comm_hook
from commhooks.hook._parameters import not_reduced
from commhooks.hook._state import HookState
from ddp_core.reducer._known import KnownParameters

__all__ = ["register_on_composable"]


def register_on_composable(
    model: nn.Module, scheme: str | Scheme, *, seed: int = 0, history: int = 100_000, **options: Any
) -> HookState:
    """Registers a scheme on a module that was passed to ``replicate()``; all ranks call it."""
    state: Any = replicate.state(model)
    present = (
        comm_hooks(composable_ddp(state)) if state.has_initialized else composable_hooks(state)
    )
    if present:
        raise RegistrationError(
            f"register: this module of replicate() already has a hook ({present[0]}), and takes one"
        )
    group = _group(state)
    hook = HookState(scheme, model, process_group=group, seed=seed, history=history, **options)
    hook.agree("commhooks.register", {"host": "replicate"}, HANDSHAKE_LIMIT)
    # Later hooks of the module are put on a list that is not read any more.
    takes_hooks: Any = composable_ddp(state) if state.has_initialized else model
    takes_hooks.register_comm_hook(hook, comm_hook)

    model.register_forward_pre_hook(_Guard(hook, state))
    return hook


class _Guard(ForwardGuard):
    """Reports forward passes to a hook; raises if the module trains other parameters."""

    def __init__(self, hook: HookState, state: Any) -> None:
        self._hook, self._state = hook, state
        self._known: KnownParameters | None = None
        self._unfrozen = UnfrozenParameters({})

    def pass_begins(self, module: nn.Module) -> None:
        ddp, call_monitor = composable_ddp(self._state), self._hook.call_monitor
        if self._known is None:  # the first forward pass has made the DistributedDataParallel
            self._known = known_parameters(module, ddp, "")
            self._unfrozen = UnfrozenParameters(_frozen(module, self._state))
            call_monitor.observe(self._hook, ddp, self._known.averaged)
        # With a mesh they are DTensors in forward passes.
        if not composable_options(self._state).get("device_mesh"):
            self._known.check()
        call_monitor.forward_begins(synchronises=ddp.require_backward_grad_sync)
        self._hook.forward_begins()
        self._unfrozen.warn()


def _frozen(model: nn.Module, state: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters that ``replicate()`` was given and does not average, by name."""
    lost = set(map(id, not_reduced(composable_ddp(state)).values()))
    named = dict(model.named_parameters())
    plain = plain_names(named)
    return {plain[name]: parameter for name, parameter in named.items() if id(parameter) in lost}


def _group(state: Any) -> dist.ProcessGroup | None:
    """Returns the ranks that ``replicate()`` averages over; None: all."""
    if state.has_initialized:
        made: dist.ProcessGroup = composable_ddp(state).process_group
        return made
    given, mesh = (composable_options(state).get(name) for name in ("process_group", "device_mesh"))
    group: dist.ProcessGroup | None = given if mesh is None else mesh.get_group()
    return group
