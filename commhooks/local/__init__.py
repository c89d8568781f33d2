"""Methods that exchange parameters, and no gradients."""

from commhooks.local.diloco import DiLoCo, local_sgd

__all__ = ["DiLoCo", "local_sgd"]
