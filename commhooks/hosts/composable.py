"""Registers a scheme on a module of ``torch.distributed._composable.replicate``.

It makes its DistributedDataParallel in the first forward pass, over a list of parameters without
names, and takes hooks until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commhooks._torch import (
    comm_hooks,
    composable_ddp,
    composable_hooks,
    composable_options,
    replicate,
)
from commhooks.core.names import plain_names
from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.attachment import Unfrozen, known_parameters
from commhooks.hook.handshake import MEETING
from commhooks.hook.hook_function import comm_hook
from commhooks.hook.parameters import not_reduced
from commhooks.hook.state import HookState
from ddp_core._torch import not_traced
from ddp_core.reducer.known import KnownParameters

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
    hook.agree("commhooks.register", {"host": "replicate"}, MEETING)
    # Later hooks of the module are put on a list that nobody reads any more.
    takes_hooks: Any = composable_ddp(state) if state.has_initialized else model
    takes_hooks.register_comm_hook(hook, comm_hook)

    guards: list[tuple[KnownParameters, Unfrozen]] = []

    def forward_begins(module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        ddp = composable_ddp(state)
        if not guards:  # the first forward pass has made the DistributedDataParallel
            guards.append((known_parameters(module, ddp, ""), Unfrozen(_frozen(module, state))))
            hook._attendance.watch(hook, ddp, guards[0][0].averaged)
        known, unfrozen = guards[0]
        if not composable_options(state).get(
            "device_mesh"
        ):  # else they are DTensors in forward passes
            known.check()
        hook._attendance.forward_begins(synchronises=ddp.require_backward_grad_sync)
        hook.forward_begins()
        unfrozen.warn()

    model.register_forward_pre_hook(_OnlyHere(forward_begins))
    return hook


class _OnlyHere:
    """Calls a function before a module's forward pass, and not before that of its copies.

    A module that is copied or pickled takes its hooks along (``copy.deepcopy(model)`` makes
    averages of weights). The function is for the first module only.

    Args:
        call: gets module and inputs; None: this is of a copy.
    """

    def __init__(self, call: Callable[[nn.Module, Any], None] | None) -> None:
        self._call = call

    # Not traced by torch.compile: it acts on state that changes from step to step.
    @not_traced
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._call is not None:
            self._call(module, inputs)

    def __reduce__(self) -> tuple[type[_OnlyHere], tuple[None]]:
        return _OnlyHere, (None,)


def _frozen(model: nn.Module, state: Any) -> dict[str, nn.Parameter]:
    """Returns the parameters that ``replicate()`` was given and does not average, by name."""
    lost = set(map(id, not_reduced(composable_ddp(state)).values()))
    named = dict(model.named_parameters())
    plain = plain_names(named)
    return {plain[name]: one for name, one in named.items() if id(one) in lost}


def _group(state: Any) -> dist.ProcessGroup | None:
    """Returns the ranks that ``replicate()`` averages over; None: all."""
    if state.has_initialized:
        made: dist.ProcessGroup = composable_ddp(state).process_group
        return made
    given, mesh = (composable_options(state).get(name) for name in ("process_group", "device_mesh"))
    found: dist.ProcessGroup | None = given if mesh is None else mesh.get_group()
    return found
