"""Shards optimizers over ranks (ZeRO-1): gradients are reduced to shards, new values gathered."""

from commhooks.zero.optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer"]
