"""Steps optimizers in backward, bucket by bucket, and calls checks before any optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_core._torch import dynamo_disable, optimizers_in_backward
from ddp_core.reducer._buckets import BucketBase

__all__ = [
    "OptimizersInBackward",
    "before_every_step",
    "has_optimizer_in_backward",
    "replace_backward_optimizers",
]

_looks: list[Callable[[], Callable[[Optimizer], None] | None]] = []
_lock = Lock()


def has_optimizer_in_backward(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch's ``_apply_optimizer_in_backward`` was called on one of the parameters."""
    return any(optimizers_in_backward(parameter) is not None for parameter in parameters)


def replace_backward_optimizers(parameters: Sequence[nn.Parameter]) -> None:
    """Removes the hooks that would step with this rank's local gradient."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in parameters:
        # They fire when the gradient comes, before it is averaged.
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()


class OptimizersInBackward:
    """Steps each parameter's optimizers when its bucket is averaged, and drops its gradient."""

    def bucket_averaged(self, bucket: BucketBase) -> None:
        """Steps the optimizers of the next bucket, whose gradients are in ``.grad``."""
        with torch.no_grad():
            for parameter in bucket.parameters:
                optimizers = optimizers_in_backward(parameter)
                if optimizers and parameter.grad is not None:
                    for optimizer in optimizers:
                        optimizer.step()
                    parameter.grad = None  # as torch's hook does; the memory is free at once


def before_every_step(look: Callable[[Optimizer], None]) -> None:
    """Calls a function before each step of any optimizer; a method while its object lives.

    Args:
        look: the function; an error in it keeps the optimizer from stepping.
    """
    _listen()
    reference = weakref.WeakMethod(look) if isinstance(look, MethodType) else lambda: look
    with _lock:
        _looks[:] = [*(known for known in _looks if known() is not None), reference]


@cache
def _listen() -> None:
    # One hook that stays. Python may collect what a hook belongs to while torch iterates over all
    # hooks: a finalizer that removes the hook would break that step of an optimizer.
    register_optimizer_step_pre_hook(_step_begins)


@dynamo_disable
def _step_begins(optimizer: Optimizer, *_: Any) -> None:
    for reference in list(_looks):
        look = reference()
        if look is not None:
            look(optimizer)
