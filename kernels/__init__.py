"""Ops: numeric primitives of the schemes. The PyTorch definition of an op is its specification."""

from ._op import implementations, op, use_kernels
from .blockwise import FORMATS, dequantize, payload_bytes, quantize, requantize
from .cast import scaled_cast
from .dct import dct
from .finite import all_finite
from .hadamard import hadamard
from .low_rank import (
    Matrices,
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    subtract_low_rank,
    unit_rows,
)
from .philox import Stream
from .random_k import gather_random, random_places, scatter_random
from .rotated import dequantize_rotated, quantize_rotated
from .sparse import scatter_add, top_k

__all__ = [
    "FORMATS",
    "Matrices",
    "Stream",
    "all_finite",
    "dct",
    "decode_low_rank",
    "dequantize",
    "dequantize_rotated",
    "gather_random",
    "hadamard",
    "implementations",
    "multiply_left",
    "multiply_right",
    "op",
    "orthonormalize",
    "payload_bytes",
    "quantize",
    "quantize_rotated",
    "random_places",
    "requantize",
    "scaled_cast",
    "scatter_add",
    "scatter_random",
    "subtract_low_rank",
    "top_k",
    "unit_rows",
    "use_kernels",
]
