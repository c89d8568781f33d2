"""Defines the core's errors, whose messages name the call, the rule, the value and the remedy."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice

__all__ = [
    "CollectiveError",
    "Error",
    "MismatchError",
    "MissingPackageError",
    "MissingRankError",
    "PeerError",
    "RoundsError",
    "SilentStoreError",
    "listed",
    "needs",
    "raised_in",
    "ranks_in_words",
]


class Error(Exception):
    """Catches every exception of ``ddp_core`` and ``commhooks``, as their base class.

    Each of them has a built-in base class, too: ``except ValueError`` still works. A wrong
    argument of a function is Python's own ``TypeError`` or ``ValueError``.
    """


class CollectiveError(Error, RuntimeError):
    """Raised when a collective failed (dead peer, timeout): ``step``, ``bucket`` and ``round``."""

    def __init__(self, message: str, *, step: int, bucket: int, round: int) -> None:
        super().__init__(message)
        self.step, self.bucket, self.round = step, bucket, round

    def __reduce__(self) -> tuple[object, ...]:
        return _collective_error, (str(self), self.step, self.bucket, self.round)


def _collective_error(message: str, step: int, bucket: int, round: int) -> CollectiveError:
    return CollectiveError(message, step=step, bucket=bucket, round=round)


class PeerError(Error, RuntimeError):
    """Raised when another rank reported a failure, which the message quotes."""


class MismatchError(Error, RuntimeError):
    """Raised when ranks do not agree on what they run."""


class MissingRankError(MismatchError):
    """Raised when a rank did not take part in a call that all ranks make."""


class SilentStoreError(MissingRankError):
    """Raised when the process that holds the store of the process group does not answer."""


class RoundsError(Error, RuntimeError):
    """Raised when a scheme yields more collectives for a bucket than its traits declare."""


class MissingPackageError(Error, ImportError):
    """Raised when a call needs an optional package that is not installed."""


def listed(names: Collection[object], most: int = 3) -> str:
    """Returns names or numbers for a message, at most ``most`` of them: "a, b, c and 2 more"."""
    first = ", ".join(map(str, islice(names, most)))
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def ranks_in_words(ranks: Collection[int]) -> str:
    """Returns ranks for a message: "rank 3", or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) != 1)} {listed(ranks, 16)}"


@contextmanager
def needs(call: str, *packages: str) -> Iterator[None]:
    """Turns a failed import of optional packages into an error that says what to install.

    Args:
        call: what the packages are for, as a user writes it.
        packages: names by which pip installs them.

    Raises:
        MissingPackageError: an import inside the ``with`` block failed.

    Example:
        >>> with needs("Timeline.frame", "pandas"):
        ...     import pandas as pd
    """
    try:
        yield
    except ImportError as error:
        # The packages themselves, not an extra of this one: that is on no index.
        raise MissingPackageError(
            f"{call} needs {' and '.join(packages)}, which cannot be imported ({error}): "
            f"pip install {' '.join(packages)}",
            name=error.name,
        ) from error


_INSTALLED = tuple(
    os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")
)


def raised_in(error: BaseException) -> str:
    """Returns the line of a user's code that raised an error, "my_scheme.py:34 in decode".

    The innermost line that is neither of this package nor installed; "": there is none.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        code = frame.f_code
        installed = os.path.realpath(code.co_filename).startswith(_INSTALLED)
        if not installed and package not in ("commhooks", "ddp_core"):
            return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
    return ""
