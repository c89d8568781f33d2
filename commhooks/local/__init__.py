"""Exchanges parameters at intervals, and no gradients (DiLoCo, local SGD)."""

# Modules, in the order in which to read them:
#
# _diloco     DiLoCo
# _fragments  the parts of a model that it exchanges in turn

from commhooks.local._diloco import DiLoCo, local_sgd

__all__ = ["DiLoCo", "local_sgd"]
