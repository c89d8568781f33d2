"""Loads the library of CPU kernels, picks the instruction set and calls its functions.

ctypes rather than a torch extension: a call costs 1 microsecond, releases the GIL, and the library
needs neither torch's headers nor its ABI (docs/design/kernels.md).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "SIGNATURES",
    "argument_types",
    "call",
    "function_of",
    "instruction_set",
    "missing",
]


# One letter per argument: i for i64, f for float, p for a pointer, ? for a pointer or null.
SIGNATURES = {
    "add_momentum": "iippifp?",
    "cast": "iipif?iiip",
    "count_votes": "ipiiiiiifp",
    "decode_cosines": "ipiipip",
    "dequantize": "iipiiiiipiifi?iiip",
    "dequantize_affine": "ipiippfip",
    "dequantize_levels": "ipiiiipiifp",
    "dequantize_parts": "ppip",
    "dequantize_rotated": "iiipiiiiipififpiiip",
    "dequantize_shared": "ipiipffp",
    "encode_cosines": "ippfpipp",
    "expand": "ipippp?",
    "fingerprint": "ippiif??iipippp?",
    "finite": "ipip",
    "gather_tail": "ipip??p",
    "gather_random": "ipi??piipi",
    "hadamard": "ipifipiii?iip",
    "hash_parts": "ippiip",
    "largest_magnitudes": "ip?iip",
    "multiply_left": "ipip??pp",
    "multiply_right": "ipip??pp",
    "orthonormalize": "pipp",
    "pack_votes": "ipiiiip",
    "quantize": "iiippi???iiiiipiii",
    "quantize_affine": "ipiippp",
    "quantize_levels": "ipiiifppii?",
    "quantize_norms": "ipiifpiiipii",
    "quantize_parts": "ppip",
    "quantize_rotated": "iiippifpiii???iiipiii",
    "quantize_shared": "ip?iipf?iiip?",
    "requantize": "iipiifpi?fi?iii?iiipiii",
    "restore": "ppip",
    "scatter_random": "pif?piiipi",
    "scatter_sum": "pipiiifipi?p",
    "squared_norms": "ippip",
    "scatter_tail": "ipipp",
    "subtract_low_rank": "pipppp",
    "subtract_tail": "pip?p",
    "top_k": "ipiipp???pi",
    "top_k_sampled": "ipiiipp???p",
    "unit_rows": "pippp",
}


class _Pointer:
    """Converts a tensor to the address of its memory."""

    @staticmethod
    def from_param(value: Any) -> ctypes.c_void_p:
        if isinstance(value, Tensor):
            return ctypes.c_void_p(value.data_ptr())
        # ctypes would take an integer for an address; None is refused where a kernel would read it.
        raise TypeError(f"a tensor, got {type(value).__name__}")


class _MaybePointer:
    """Converts a tensor to the address of its memory, and None to null."""

    @staticmethod
    def from_param(value: Any) -> ctypes.c_void_p | None:
        return None if value is None else _Pointer.from_param(value)


_TYPES = {"i": ctypes.c_int64, "f": ctypes.c_float, "p": _Pointer, "?": _MaybePointer}


def argument_types(name: str) -> list[Any]:
    """Returns the argument types of the kernel ``name`` for ctypes."""
    return [_TYPES[kind] for kind in SIGNATURES[name]]


# ---- calls


_NAME, _REASON = "libcommhooks_kernels.so", "not_built.txt"
_TOO_OLD = "this processor lacks x86-64-v3 (AVX2, FMA, BMI2, F16C, ...), which CPU kernels need"
# The numbers that `with_dtype` of include/cpu.h expects.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
INSTRUCTION_SETS = ("base", "v3", "v4")  # in the order of the library's own numbers


@cache
def _library() -> ctypes.CDLL | None:
    path = resources.files("commhooks.kernels").joinpath(_NAME)
    return ctypes.CDLL(str(path)) if path.is_file() else None


@cache
def _best() -> int:
    """Returns the place of this processor's best instruction set, or -1 if there is none."""
    # The library asks the processor for features, as its compiler may not know the names of levels.
    library = _library()
    return -1 if library is None else int(library.instruction_set())


def missing() -> str | None:
    """Returns why CPU kernels cannot run; None if they can."""
    if _library() is None:
        return _why_missing()
    return _TOO_OLD if _best() < 0 else None


@cache
def _why_missing() -> str:
    folder = resources.files("commhooks.kernels")
    report = folder.joinpath(_REASON)  # written by setup.py
    first = report.read_text(encoding="utf-8").partition("\n")[0] if report.is_file() else ""
    because = f" ({first.rstrip(':')})" if first else ""
    return (
        f"the package in {folder} was installed without its CPU kernels{because}; install "
        "g++ or clang++ and then commhooks again, from its source folder: "
        "'pip install --force-reinstall --no-deps .'"
    )


@cache
def instruction_set() -> str:
    """Returns the instruction set that runs here: "v4" or "v3" (x86-64), or "base" (others).

    ``COMMHOOKS_CPU`` selects a smaller one, for comparisons and tests.
    """
    if reason := missing():
        raise RuntimeError(f"commhooks.kernels: {reason}")
    best = INSTRUCTION_SETS[_best()]
    chosen = os.environ.get("COMMHOOKS_CPU", best)
    usable = INSTRUCTION_SETS[1 : INSTRUCTION_SETS.index(best) + 1] or ("base",)
    if chosen not in usable:
        raise ValueError(f"COMMHOOKS_CPU is one of {', '.join(usable)} here, got {chosen!r}")
    return chosen


@cache
def _function(name: str) -> Any:
    return function_of(_library(), name, instruction_set())


def function_of(library: Any, name: str, instruction_set: str) -> Any:
    """Returns a function of a library of kernels that refuses arguments of a wrong kind."""
    function = getattr(library, f"{name}_{instruction_set}")
    function.restype = None  # void; ctypes assumes int
    # Without them ctypes passes 32-bit integers, and cuts off a pointer or a count above 2^31.
    function.argtypes = argument_types(name)
    return function


def call(name: str, *arguments: Tensor | float | None) -> None:
    """Calls the function ``name`` of this processor's instruction set, from any thread.

    Functions keep no state and start no threads: backward passes, lanes and data loaders share the
    processor, and OpenMP's threads wait for one another where cores are busy.
    """
    _function(name)(*arguments)
