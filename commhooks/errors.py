"""Errors users meet; every message names the call, the rule, what came and what to do."""

from ddp_core import (
    CollectiveError,
    Error,
    MismatchError,
    MissingPackageError,
    MissingRankError,
    PeerError,
    RoundsError,
)

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "Error",
    "HookNotAttachedError",
    "MismatchError",
    "MissingPackageError",
    "MissingRankError",
    "OptionError",
    "PayloadError",
    "PeerError",
    "RegistrationError",
    "RoundsError",
    "SchemeError",
    "UnknownSchemeError",
]


class RegistrationError(Error, RuntimeError):
    """A hook cannot be registered here, or not again."""


class HookNotAttachedError(Error, RuntimeError):
    """A hook that the model lists does not run."""


class UnknownSchemeError(Error, ValueError):
    """No scheme of that name is registered."""


class OptionError(Error, TypeError, ValueError):
    """A scheme does not take that option, or not that value of it."""


class SchemeError(Error, RuntimeError):
    """A scheme broke its contract (wrong shape, dtype or type of result)."""


class PayloadError(Error, ValueError):
    """Received bytes do not decode."""


class CheckpointError(Error, RuntimeError):
    """A saved state cannot be loaded here; nothing was changed."""
