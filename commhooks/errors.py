"""Errors users meet; every message names the call, the rule, what came and what to do."""

from ddp_core import CollectiveError, MismatchError, MissingRankError

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "HookNotAttachedError",
    "MismatchError",
    "MissingRankError",
    "OptionError",
    "PayloadError",
    "RegistrationError",
    "SchemeError",
    "UnknownSchemeError",
]


class RegistrationError(RuntimeError):
    """A hook cannot be registered here, or not again."""


class HookNotAttachedError(RuntimeError):
    """A hook that the model lists does not run."""


class UnknownSchemeError(ValueError):
    """No scheme of that name is registered."""


class OptionError(TypeError, ValueError):
    """A scheme does not take that option, or not that value of it."""


class SchemeError(RuntimeError):
    """A scheme broke its contract (wrong shape, dtype or type of result)."""


class PayloadError(ValueError):
    """Received bytes do not decode."""


class CheckpointError(RuntimeError):
    """A saved state cannot be loaded here; nothing was changed."""
