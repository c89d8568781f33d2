"""Defines the saved form of a hook's state, which is the same for all schemes."""

from commhooks.checkpoint.flat import flatten_state, unflatten_state

__all__ = ["flatten_state", "unflatten_state"]
