"""Mirrors torch's ``ddp_zero_hook``: steps a ZeroRedundancyOptimizer during backward.

These are torch's functions, which refuse Gloo and know torch's class only. Where they refuse,
:class:`commhooks.ZeroOptimizer` is the way: it steps any elementwise optimizer in shards, on
``ddp_core.DistributedDataParallel`` and any backend.
"""

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as _torchs
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from commhooks.classic._launch import HookFunction
from commhooks.classic._optimizer_overlap import in_bucket
from commhooks.errors import RegistrationError
from ddp_core import DistributedDataParallel as CoreDDP

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]


def hook_with_zero_step(
    hook: HookFunction,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> HookFunction:
    """Returns a hook that runs ``hook``, and steps ``zero`` when the last bucket is ready.

    Args:
        hook: any hook, whose state the new hook takes.
        ddp, zero: the model and its optimizer, made with ``overlap_with_ddp=True``.
        shard_buckets: spreads the parameters of each bucket over several ranks.

    Raises:
        ValueError: ``zero`` was made without ``overlap_with_ddp``.
        RuntimeError: the model runs on Gloo, or is not in torch's class; use
            :class:`commhooks.ZeroOptimizer`.
    """
    return _stepping(_torchs.hook_with_zero_step, hook, ddp, zero, shard_buckets)


def hook_with_zero_step_interleaved(
    hook: HookFunction,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> HookFunction:
    """Returns a hook as :func:`hook_with_zero_step`, which steps each bucket when it is averaged.

    Args:
        hook, ddp, zero, shard_buckets: see :func:`hook_with_zero_step`.

    Raises:
        ValueError, RuntimeError: see :func:`hook_with_zero_step`.
    """
    return _stepping(_torchs.hook_with_zero_step_interleaved, hook, ddp, zero, shard_buckets)


def _stepping(
    make: Callable[..., Any], hook: HookFunction, ddp: Any, zero: Any, shard_buckets: bool
) -> HookFunction:
    if isinstance(ddp, CoreDDP):
        # They start broadcasts from callbacks of futures, in the group of the gradients.
        raise RegistrationError(
            f"{make.__name__}: torch's function takes a model in torch's DistributedDataParallel, "
            f"got one in ddp_core's; use commhooks.ZeroOptimizer(model, optimizer_class, ...) there"
        )
    # They read the gradients from the bucket, whatever ``hook`` returns.
    stepping = make(in_bucket(hook), ddp, zero, shard_buckets)
    stepping.__wrapped__ = hook  # by which a PowerSGDState finds its hook
    return stepping  # type: ignore[no-any-return]
