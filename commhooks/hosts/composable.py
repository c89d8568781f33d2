"""Registers a scheme on a module of ``torch.distributed._composable.replicate``.

It makes its DistributedDataParallel in the first forward pass, over a list of parameters without
names, and takes hooks until then.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.hook_function import comm_hook
from commhooks.hook.state import HookState

__all__ = ["register_on_composable"]


def register_on_composable(
    model: nn.Module, scheme: str | Scheme, *, seed: int = 0, history: int = 100_000, **options: Any
) -> HookState:
    """Registers a scheme on a module that was passed to ``replicate()``; all ranks call it."""
    state: Any = replicate.state(model)
    present = state._ddp._comm_hooks if state.has_initialized else state._comm_hook_args
    if present:
        raise RegistrationError(
            f"register: this module of replicate() already has a hook ({present[0]}), and takes one"
        )
    group = _group(state)
    hook = HookState(scheme, model, process_group=group, seed=seed, history=history, **options)
    hook.agree("commhooks.register", {"host": "replicate"}, MEETING)
    # Later hooks of the module are put on a list that nobody reads any more.
    takes_hooks: Any = state._ddp if state.has_initialized else model
    takes_hooks.register_comm_hook(hook, comm_hook)

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined]
    def forward_begins(module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            hook.forward_begins()

    model.register_forward_pre_hook(forward_begins)
    return hook


def _group(state: Any) -> dist.ProcessGroup | None:
    """Returns the ranks that ``replicate()`` averages over; None: all."""
    if state.has_initialized:
        made: dist.ProcessGroup = state._ddp.process_group
        return made
    given, mesh = (state._init_kwargs.get(name) for name in ("process_group", "device_mesh"))
    found: dist.ProcessGroup | None = given if mesh is None else mesh.get_group()
    return found
