"""Defines hooks that step an optimizer as soon as a bucket is averaged, during backward.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from commhooks._torch import OptimizerHookState as _OptimizerHookState
from commhooks.classic._launch import BucketFuture, HookFunction

__all__ = ["_OptimizerHookState", "_hook_then_optimizer", "in_bucket"]


def _hook_then_optimizer(hook: HookFunction, optimizer_state: _OptimizerHookState) -> HookFunction:
    """Returns a hook that runs ``hook`` and then steps the bucket's parameters.

    Args:
        hook: any hook, whose state the new hook takes.
        optimizer_state: a functional optimizer, and the parameters that it steps (all by default).

    Example:
        >>> optimizer = _OptimizerHookState(_FunctionalSGD(list(ddp_model.parameters()), lr=0.1))
        >>> ddp_model.register_comm_hook(state, _hook_then_optimizer(powerSGD_hook, optimizer))
    """
    optimizer = optimizer_state.functional_optimizer
    chosen = getattr(optimizer_state, "params_to_optimize", None)
    # Callbacks of futures run in the threads that complete them, possibly of two buckets at once;
    # functional optimizers, whose state is one dictionary, are not made for that.
    one_at_a_time = threading.Lock()

    averaged = in_bucket(hook)

    def hook_then_optimizer_wrapper(hook_state: Any, bucket: GradBucket) -> BucketFuture:
        def step(done: BucketFuture) -> Tensor:
            with one_at_a_time, torch.no_grad():  # grad mode is on in threads of lanes
                for parameter, gradient in _gradients(bucket):
                    if chosen is None or parameter in chosen:
                        optimizer.step_param(parameter, gradient)
            return done.value()

        return averaged(hook_state, bucket).then(step)

    # Not functools.wraps, which would take over the name: DDP refuses some names, see
    # ``_cast_wrappers``. ``__wrapped__`` lets a PowerSGDState find the hook it is registered with.
    hook_then_optimizer_wrapper.__wrapped__ = hook  # type: ignore[attr-defined]
    return hook_then_optimizer_wrapper


def in_bucket(hook: HookFunction) -> HookFunction:
    """Returns a hook that writes the result of ``hook`` into the bucket.

    The optimizers of overlapping hooks read gradients from the bucket, while a hook may return
    another tensor than the bucket's.
    """

    def averaged(hook_state: Any, bucket: GradBucket) -> BucketFuture:
        def keep(done: torch.futures.Future[Any]) -> Tensor:
            value = done.value()
            mean: Tensor = value[0] if isinstance(value, (list, tuple)) else value
            bucket.set_buffer(mean)
            return mean

        return hook(hook_state, bucket).then(keep)

    return averaged


def _gradients(bucket: GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each parameter of a bucket with its gradient, in the memory order of the parameter."""
    # DDP copies the gradient of a channels-last weight to the bucket in its memory order, but
    # ``bucket.gradients()`` views it as if it were contiguous.
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        strided = gradient.layout == torch.strided and gradient.stride() != parameter.stride()
        if strided and torch.ops.aten.is_non_overlapping_and_dense(parameter):
            gradient = gradient.as_strided(parameter.shape, parameter.stride())
        yield parameter, gradient
