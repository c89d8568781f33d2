"""Runs schemes as collectives of single tensors: functions, and an object that keeps memory."""

# Modules, in the order in which to read them:
#
# _functions  all_reduce and the like, and Collectives
# _calls      one call under way

from commhooks.collectives._functions import Collectives, all_gather, all_reduce, reduce_scatter

__all__ = ["Collectives", "all_gather", "all_reduce", "reduce_scatter"]
