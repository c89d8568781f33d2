"""Registers torch's own communication hooks, PowerSGD with the repair that it needs on Gloo.

A hook with several collectives issues the later ones in callbacks. Callbacks of different buckets
may run in another order on each rank, and Gloo then pairs collectives of different buckets. So each
bucket gets a process group of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from commhooks.hook import as_hook

__all__ = ["SAME", "TORCH", "register_of_torch"]

# Names in the study. Three hooks of torch 2.13 fail on Gloo: `bf16_compress_hook` refuses processes
# without NCCL or XCCL, `batched_powerSGD_hook` raises an AssertionError (on NCCL, too: it passes a
# matrix where a batch of them is asked for), and the quantisation hooks take the first tensor of an
# all-gather for all of them. The hooks of this package are the repaired forms of the last two.
TORCH = ("torch none", "torch fp16", "torch powersgd")
# Schemes of this package with the same messages and arithmetic.
SAME = {"torch none": "none", "torch fp16": "fp16"}


class _OfBuckets:
    """Keeps the PowerSGD state of each bucket, with a process group of its own."""

    def __init__(self, count: int = 16) -> None:
        groups = [dist.new_group() for _ in range(count)]
        self.states = [
            powerSGD_hook.PowerSGDState(
                group, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=True
            )
            for group in groups
        ]
        self.step = 0


def _power_sgd(state: _OfBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state_of_bucket = state.states[bucket.index()]
    state_of_bucket.iter = state.step
    state.step += bucket.is_last()
    return powerSGD_hook.powerSGD_hook(state_of_bucket, bucket)


def register_of_torch(ddp: DistributedDataParallel, name: str) -> None:
    """Registers a hook of torch on torch's class.

    Args:
        ddp: the model.
        name: one of ``TORCH``.
    """
    if name == "torch fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if name == "torch powersgd":
        ddp.register_comm_hook(_OfBuckets(), as_hook(_power_sgd))
