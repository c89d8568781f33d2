"""Files that tests compile, once a run for all workers and the processes that tests start."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["FOLDER", "built", "folder"]

FOLDER = "COMMHOOKS_BUILDS"  # in the environment, by conftest.py


@cache
def folder() -> Path:
    """The folder of compiled files; for a program that runs without pytest, one of its own."""
    return Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="builds-"))


def built(name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder of that name, which ``make`` writes if nobody has before.

    Args:
        name: has to differ where the result does, by a hash of the sources for instance.
        make: takes the path to write to, which has the suffix of ``name``.
    """
    path = folder() / name
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_name(f"unfinished-{name}")
            make(unfinished)
            unfinished.rename(path)
    return path
