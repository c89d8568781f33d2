"""The library of CPU kernels: finds it, picks the instruction set, calls it by ctypes."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from ._arguments import as_ctypes

__all__ = ["DTYPES", "call", "instruction_set", "missing"]

_NAME = "libcommhooks_kernels.so"
# As the C++ code numbers them.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INSTRUCTION_SETS = ("base", "v2", "v3", "v4")  # x86-64 levels, and plain C++ elsewhere


@cache
def _library() -> ctypes.CDLL | None:
    path = resources.files("commhooks.kernels").joinpath(_NAME)
    return ctypes.CDLL(str(path)) if path.is_file() else None


def missing() -> str | None:
    """Why CPU kernels cannot run; None if they can."""
    if _library() is None:
        return (
            "the package was installed without its CPU kernels; install g++ and then "
            "commhooks again: pip install --force-reinstall --no-deps commhooks"
        )
    return None


@cache
def instruction_set() -> str:
    """What the kernels were compiled for that run here: "v4", "v3", "v2" (x86-64) or "base".

    ``COMMHOOKS_CPU`` names a lesser one, for comparisons.
    """
    library = _library()
    if library is None:
        raise RuntimeError(f"commhooks.kernels: {missing()}")
    best = INSTRUCTION_SETS[library.instruction_set()]
    asked = os.environ.get("COMMHOOKS_CPU", best)
    usable = INSTRUCTION_SETS[1 : INSTRUCTION_SETS.index(best) + 1] or ("base",)
    if asked not in usable:
        raise ValueError(f"COMMHOOKS_CPU is one of {', '.join(usable)} here, got {asked!r}")
    return asked


@cache
def _function(name: str) -> Any:
    found = getattr(_library(), f"{name}_{instruction_set()}")
    found.restype = None
    return found


def call(name: str, *arguments: Tensor | float | None) -> None:
    """Calls the function of that name, for this processor; functions are re-entrant."""
    _function(name)(*map(as_ctypes, arguments))
