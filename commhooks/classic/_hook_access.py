"""What classic hooks need of a ``HookState`` beyond its public methods, all of it in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.hook import saving as _checkpoint_hook
from commhooks.hook.state import HookState

__all__ = [
    "continue_from",
    "group_of",
    "layout_of",
    "load",
    "memory_of",
    "set_seed",
    "set_step",
    "step_under_way",
]


def group_of(hook: HookState) -> dist.ProcessGroup:
    """The ranks it averages over."""
    return hook._binding.group()


def memory_of(hook: HookState) -> Memory:
    """What its scheme remembers, by key and parameter name."""
    return hook._engine.memory


def layout_of(hook: HookState, parameters: Sequence[Tensor]) -> Layout:
    """The layout of a bucket of these parameters, with their names in the model."""
    return hook._parameters.layout(parameters)


def step_under_way(hook: HookState) -> bool:
    """Whether buckets of a step that has not ended were launched."""
    return hook._runner.under_way


def set_step(hook: HookState, step: int) -> None:
    """Goes on as if so many steps were made."""
    hook._engine.step = step


def set_seed(hook: HookState, seed: int) -> None:
    """Draws by another seed from the next step on."""
    hook._engine.seed = seed


def continue_from(hook: HookState, before: HookState) -> None:
    """Takes over step count and memory of another state, which is closed."""
    kept = before.__getstate__()
    memory_of(hook).load(kept["memory"])
    set_step(hook, kept["step"])
    before.close()


def load(
    hook: HookState,
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    strict: bool,
    alone: bool,
    call: str,
) -> None:
    """Continues from a saved state, before the first step; ``alone``: it may be another rank's.

    Raises:
        CheckpointError: it does not fit; nothing was changed.
    """
    loaded = _checkpoint_hook.prepare(hook, saved, strict, call, alone=alone)
    _checkpoint_hook.take_up(hook, loaded)
