"""What the functions of the library of CPU kernels take, as their sources declare it."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

__all__ = ["SIGNATURES", "argument_types"]

# In the order of the arguments: i an i64, f a float, p a pointer, ? one that may be null.
SIGNATURES = {
    "cast": "iipif?iiip",
    "dct": "pipp",
    "dequantize": "iipiiiiifip",
    "dequantize_affine": "ipiippfip",
    "dequantize_levels": "ipppiiip",
    "dequantize_rotated": "iiipiiiififpiiip",
    "dequantize_shared": "ipiipffp",
    "expand": "ipipp????p",
    "finite": "ipip",
    "gather_random": "ipi??piipi",
    "hadamard": "ipifipiiip",
    "largest_magnitudes": "ip?iip",
    "multiply_left": "ipippp",
    "multiply_right": "ipip??pp",
    "orthonormalize": "pip",
    "pack_bits": "pip",
    "quantize": "iiipi???iiipii",
    "quantize_affine": "ipiippp",
    "quantize_levels": "ipiifppp?",
    "quantize_rotated": "iiipifpiii???iiipii",
    "quantize_shared": "ip?iipf?iiip?",
    "requantize": "iipiifi???iiipii",
    "scatter_add": "ppifpip",
    "scatter_random": "pifpiipi",
    "top_k": "ipiipp??pi",
    "top_k_sampled": "ipiiipp??p",
    "unit_rows": "pipp",
    "unpack_bits": "pip",
}


class _Pointer:
    """A tensor's memory."""

    @staticmethod
    def from_param(value: Any) -> ctypes.c_void_p:
        if isinstance(value, Tensor):
            return ctypes.c_void_p(value.data_ptr())
        raise TypeError(f"a tensor, got {type(value).__name__}")


class _MaybePointer:
    """A tensor's memory, or null."""

    @staticmethod
    def from_param(value: Any) -> ctypes.c_void_p | None:
        return None if value is None else _Pointer.from_param(value)


_TYPES = {"i": ctypes.c_int64, "f": ctypes.c_float, "p": _Pointer, "?": _MaybePointer}


def argument_types(name: str) -> list[Any]:
    """The types of the arguments of a kernel's function, for ctypes."""
    return [_TYPES[kind] for kind in SIGNATURES[name]]
