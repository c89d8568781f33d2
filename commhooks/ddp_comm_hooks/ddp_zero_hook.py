"""torch's ``ddp_zero_hook``: ZeroRedundancyOptimizer's step while backward goes on.

On ``ddp_core.DistributedDataParallel`` our own, which run on Gloo, too. On torch's class torch's
functions, which refuse Gloo; around a hook whose result is put where they look for it.
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
    """A hook that does what ``hook`` does, and steps ``zero`` once the last bucket has come.

    Args:
        hook: any hook; the new one takes its state.
        ddp, zero: the model and its optimizer, made with ``overlap_with_ddp=True``.
        shard_buckets: spread every bucket over several ranks.

    Raises:
        ValueError, RuntimeError: without ``overlap_with_ddp``; of torch's class also on Gloo.
    """
    hook_of = hook if isinstance(ddp, CoreDDP) else in_bucket(hook)
    made: Any = _zero.hook_with_zero_step(hook_of, ddp, zero, shard_buckets)
    made.__wrapped__ = hook
    return made  # type: ignore[no-any-return]


def hook_with_zero_step_interleaved(
    hook: HookFunction,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> HookFunction:
    """As :func:`hook_with_zero_step`, with every bucket's step in the order of the buckets.

    Args:
        hook, ddp, zero, shard_buckets: see :func:`hook_with_zero_step`.

    Raises:
        ValueError, RuntimeError: without ``overlap_with_ddp``; of torch's class also on Gloo.
    """
    hook_of = hook if isinstance(ddp, CoreDDP) else in_bucket(hook)
    made: Any = _zero.hook_with_zero_step_interleaved(hook_of, ddp, zero, shard_buckets)
    made.__wrapped__ = hook
    return made  # type: ignore[no-any-return]
