"""Mirrors torch's ``optimizer_overlap_hooks``: steps a bucket as soon as it is averaged."""

from commhooks.classic._optimizer_overlap import _hook_then_optimizer, _OptimizerHookState

__all__ = ["_OptimizerHookState", "_hook_then_optimizer"]
