"""Runs schemes as collectives of single tensors: functions, and an object that keeps memory."""

from commhooks.collectives.functions import Collectives, all_gather, all_reduce, reduce_scatter

__all__ = ["Collectives", "all_gather", "all_reduce", "reduce_scatter"]
