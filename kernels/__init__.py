"""Numeric primitives of the schemes, called ops; the PyTorch definition of each specifies it."""

from .affine import dequantize_affine, quantize_affine
from .bitmap import pack_bits, unpack_bits
from .blockwise import FORMATS, dequantize, payload_bytes, quantize
from .cast import scaled_cast
from .dct import dct
from .finite import all_finite
from .hadamard import hadamard
from .levels import dequantize_levels, quantize_levels
from .low_rank import (
    Matrices,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    unit_rows,
)
from .norms import quantize_norms
from .parts import dequantize_parts, quantize_parts, squared_norms
from .philox import RandomBits
from .random_k import gather_random, random_places, scatter_random
from .requantize import requantize
from .restore import restore
from .rotated import dequantize_rotated, quantize_rotated
from .runtime.op import implementations, op, use_kernels, warn_if_missing
from .shared import dequantize_shared, largest_magnitudes, quantize_shared
from .sparse import scatter_add, top_k, top_k_sampled

__all__ = [
    "FORMATS",
    "Matrices",
    "RandomBits",
    "all_finite",
    "dct",
    "decode_low_rank",
    "dequantize",
    "dequantize_affine",
    "dequantize_levels",
    "dequantize_parts",
    "dequantize_rotated",
    "dequantize_shared",
    "gather_random",
    "hadamard",
    "implementations",
    "largest_magnitudes",
    "multiply_left",
    "multiply_right",
    "op",
    "orthonormalize",
    "pack_bits",
    "payload_bytes",
    "quantize",
    "quantize_affine",
    "quantize_levels",
    "quantize_norms",
    "quantize_parts",
    "quantize_rotated",
    "quantize_shared",
    "random_places",
    "requantize",
    "restore",
    "scaled_cast",
    "scatter_add",
    "scatter_random",
    "squared_norms",
    "top_k",
    "top_k_sampled",
    "unit_rows",
    "unpack_bits",
    "use_kernels",
    "warn_if_missing",
]
