"""The saved form of a hook"s state, whatever hook it is of."""

from commhooks.checkpoint.flat import flatten_state, unflatten_state

__all__ = ["flatten_state", "unflatten_state"]
