"""Mirrors torch's ``ddp_zero_hook``: steps a ZeroRedundancyOptimizer during backward.

Models in ``ddp_core.DistributedDataParallel`` get the hooks of ``ddp_core.zero``, which run on any
backend. Models in torch's class get torch's hooks, which refuse Gloo.
"""

from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from commhooks.classic._launch import HookFunction
from commhooks.classic._optimizer_overlap import in_bucket
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core import zero as _zero

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
        ValueError, RuntimeError: ``zero`` was made without ``overlap_with_ddp``, or a model in
            torch's class runs on Gloo.
    """
    # torch's hooks read the gradients from the bucket, whatever ``hook`` returns.
    inner = hook if isinstance(ddp, CoreDDP) else in_bucket(hook)
    overlapping: Any = _zero.hook_with_zero_step(inner, ddp, zero, shard_buckets)
    overlapping.__wrapped__ = hook  # by which a PowerSGDState finds its hook
    return overlapping  # type: ignore[no-any-return]


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
    inner = hook if isinstance(ddp, CoreDDP) else in_bucket(hook)
    overlapping: Any = _zero.hook_with_zero_step_interleaved(inner, ddp, zero, shard_buckets)
    overlapping.__wrapped__ = hook
    return overlapping  # type: ignore[no-any-return]
