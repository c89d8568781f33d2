"""Lists the argument types of the CPU kernels; a test compares them with the sources."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

__all__ = ["SIGNATURES", "argument_types"]

# One letter per argument: i for i64, f for float, p for a pointer, ? for a pointer or null.
SIGNATURES = {
    "cast": "iipif?iiip",
    "count_votes": "ipiiiiiifp",
    "dct": "piip",
    "dequantize": "iipiiiiipiifi?iiip",
    "dequantize_affine": "ipiippfip",
    "dequantize_levels": "ipiiiipiip",
    "dequantize_parts": "ppip",
    "dequantize_rotated": "iiipiiiiipififpiiip",
    "dequantize_shared": "ipiipffp",
    "expand": "ipippp?",
    "finite": "ipip",
    "gather_tail": "ipip??p",
    "gather_random": "ipi??piipi",
    "hadamard": "ipifipiii?ip",
    "largest_magnitudes": "ip?iip",
    "multiply_left": "ipip??pp",
    "multiply_right": "ipip??pp",
    "orthonormalize": "pipp",
    "pack_votes": "ipiiiip",
    "quantize": "iiippi???iiiiipiii",
    "quantize_affine": "ipiippp",
    "quantize_levels": "ipiiifppi?",
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
    "top_k": "ipiipp??pi",
    "top_k_sampled": "ipiiipp??p",
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
