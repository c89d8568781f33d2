"""Shards optimizers over ranks (ZeRO-1): gradients are reduced to shards, new values gathered."""

# Modules, in the order in which to read them:
#
# _optimizer  ZeroOptimizer
# _hook       reduces each bucket to a shard
# _shards     the shards of a rank, stepped and gathered
# _shard      one of them
# _saving     the optimizer's state

from commhooks.zero._optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
