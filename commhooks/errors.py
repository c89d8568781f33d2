"""Defines the exceptions of ``commhooks``; messages have call, rule, value and remedy.

Each has a built-in base class besides ``Error``, so that ``except ValueError`` catches it.
"""

from ddp_core import (
    CollectiveError,
    Error,
    MismatchError,
    MissingPackageError,
    MissingRankError,
    PeerError,
    RoundsError,
    SilentStoreError,
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
    "PeerError",
    "RegistrationError",
    "RoundsError",
    "SchemeError",
    "SilentStoreError",
    "UnknownSchemeError",
    "VerificationError",
]


class RegistrationError(Error, RuntimeError):
    """Raised when a hook cannot be registered, or cannot do in its present state what was asked."""


class HookNotAttachedError(Error, RuntimeError):
    """Raised when a registered hook does not take part in the backward pass."""


class UnknownSchemeError(Error, ValueError):
    """Raised when no scheme of the given name is registered."""


class OptionError(Error, TypeError, ValueError):
    """Raised when a scheme does not take an option, or not the given value of it."""


class SchemeError(Error, RuntimeError):
    """Raised when a scheme breaks its contract: a wrong shape, dtype or type of result."""


class CheckpointError(Error, RuntimeError):
    """Raised when a saved state cannot be loaded here; the hook stays as it was."""


class VerificationError(Error, RuntimeError):
    """Raised when a verified step shows that ranks differ, or an error that the law forbids."""
