"""Optimizers that step in backward, bucket by bucket, as soon as a bucket is averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ddp_core._flat import FlatBucket

__all__ = ["has_optimizer_in_backward", "step_bucket", "take_over"]


def has_optimizer_in_backward(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether ``torch.distributed.optim._apply_optimizer_in_backward`` was called on one."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


def take_over(parameters: Sequence[nn.Parameter]) -> None:
    """Removes the hooks that would step with this rank's own gradient."""
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            handle.remove()


def step_bucket(bucket: FlatBucket) -> None:
    """Steps the optimizers of the bucket's parameters and drops their gradients."""
    with torch.no_grad():
        for parameter in bucket.parameters:
            optimizers = getattr(parameter, "_in_backward_optimizers", ())
            if optimizers and parameter.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                parameter.grad = None
