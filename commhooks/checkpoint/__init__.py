"""Defines the saved form of a hook's state, which is the same for all schemes."""

# Modules, in the order in which to read them:
#
# _format              the format of a saved state, and its checks
# _plain_scheme        a scheme as plain values
# _memory              checks that tensors fit a scheme and a model
# _ranks               states on another number of ranks
# _pieces, _placement  pieces of parameters that are cut
# _flat                tensors and strings alone, for safetensors

from commhooks.checkpoint._flat import flatten_state, unflatten_state

__all__ = ["flatten_state", "unflatten_state"]
