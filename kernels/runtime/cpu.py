"""The library of CPU kernels: finds it, picks the instruction set, calls it by ctypes."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from .signatures import argument_types

__all__ = ["DTYPES", "call", "function_of", "instruction_set", "missing"]

_NAME, _REASON = "libcommhooks_kernels.so", "not_built.txt"
# As the C++ code numbers them.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INSTRUCTION_SETS = ("base", "v2", "v3", "v4")  # x86-64 levels, and plain C++ elsewhere


@cache
def _library() -> ctypes.CDLL | None:
    path = resources.files("commhooks.kernels").joinpath(_NAME)
    return ctypes.CDLL(str(path)) if path.is_file() else None


def missing() -> str | None:
    """Why CPU kernels cannot run; None if they can."""
    return None if _library() is not None else _why_missing()


@cache
def _why_missing() -> str:
    told = resources.files("commhooks.kernels").joinpath(_REASON)  # written by setup.py
    first = told.read_text(encoding="utf-8").partition("\n")[0] if told.is_file() else ""
    because = f" ({first.rstrip(':')})" if first else ""
    return (
        f"the package was installed without its CPU kernels{because}; install g++ or clang++ and "
        "then commhooks again, from its source folder: pip install --force-reinstall --no-deps ."
    )


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
    return function_of(_library(), name, instruction_set())


def function_of(library: Any, name: str, instruction_set: str) -> Any:
    """A function of a library of kernels, which refuses arguments of a wrong number or kind."""
    found = getattr(library, f"{name}_{instruction_set}")
    found.restype = None
    found.argtypes = argument_types(name)
    return found


def call(name: str, *arguments: Tensor | float | None) -> None:
    """Calls the function of that name, for this processor; functions are re-entrant."""
    _function(name)(*arguments)
