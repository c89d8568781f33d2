"""Provides the private parts of a ``HookState`` that classic hooks need.

All access of this package to private parts of a ``HookState`` is in this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from commhooks.core._memory import Memory
from commhooks.hook import _saving as _checkpoint_hook
from commhooks.hook._state import HookState

__all__ = [
    "continue_from",
    "group_of",
    "load",
    "memory_of",
    "set_seed",
    "set_step",
    "step_under_way",
]


def group_of(hook: HookState) -> dist.ProcessGroup:
    """Returns the process group that a hook averages over."""
    return hook.target.group()


def memory_of(hook: HookState) -> Memory:
    """Returns the memory of a hook's scheme, by key and parameter name."""
    return hook.engine.memory


def step_under_way(hook: HookState) -> bool:
    """Whether a step has begun and not ended."""
    return hook.runner.under_way


def set_step(hook: HookState, step: int) -> None:
    """Sets the number of steps that a hook has made."""
    hook.engine.step = step


def set_seed(hook: HookState, seed: int) -> None:
    """Sets the seed of random draws, from the next step on."""
    hook.engine.seed = seed


def continue_from(hook: HookState, before: HookState) -> None:
    """Moves the step count and the memory of ``before`` to ``hook``, and closes ``before``."""
    # Its pickled form holds copies, so that closing ``before`` takes nothing away from ``hook``.
    pickled = before.__getstate__()
    memory_of(hook).load(pickled["memory"])
    set_step(hook, pickled["step"])
    before.close()


def load(
    hook: HookState,
    saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    strict: bool,
    alone: bool,
    call: str,
) -> None:
    """Continues from a saved state, before the first step.

    Args:
        saved: one state, or those of all ranks.
        strict: see :meth:`HookState.load_state_dict`.
        alone: accepts the state of another rank; this rank then starts without a residual.
        call: for error messages.

    Raises:
        CheckpointError: the state does not fit; nothing was changed.
    """
    loaded = _checkpoint_hook.prepare(hook, saved, strict, call, alone=alone)
    _checkpoint_hook.apply(hook, loaded)
