"""Finds the user's line that a warning is about."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["user_stacklevel"]

_OURS = ("commhooks", "ddp_core")


def user_stacklevel() -> int:
    """Returns the ``stacklevel`` of the nearest line outside of this package.

    For a call of ``warnings.warn`` to which several public functions lead.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    return level
