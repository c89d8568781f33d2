"""Numeric primitives of the schemes, called ops; the PyTorch definition of each specifies it."""

from .affine import dequantize_affine, quantize_affine
from .blockwise import FORMATS, dequantize, payload_bytes, quantize, segments_for
from .cast import scaled_cast
from .dct import dct
from .finite import all_finite
from .hadamard import hadamard
from .levels import dequantize_levels, level_bytes, quantize_levels
from .low_rank import (
    Matrices,
    decode_low_rank,
    multiply_left,
    multiply_right,
    subtract_low_rank,
    tail_table,
)
from .norms import quantize_norms
from .orthonormal import orthonormalize, unit_rows
from .parts import dequantize_parts, part_bytes, quantize_parts, squared_norms
from .philox import RandomBits
from .random_k import gather_random, random_places, scatter_random
from .requantize import requantize
from .restore import restore
from .rotated import dequantize_rotated, quantize_rotated
from .runtime.op import implementations, op, use_kernels, warn_if_missing
from .scatter import scatter_sum
from .segments import Segments
from .shared import dequantize_shared, largest_magnitudes, quantize_shared
from .sparse import top_k, top_k_sampled
from .votes import count_votes, pack_votes, vote_bytes

__all__ = [
    "FORMATS",
    "Matrices",
    "RandomBits",
    "Segments",
    "all_finite",
    "count_votes",
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
    "level_bytes",
    "multiply_left",
    "multiply_right",
    "op",
    "orthonormalize",
    "pack_votes",
    "part_bytes",
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
    "scatter_random",
    "scatter_sum",
    "segments_for",
    "squared_norms",
    "subtract_low_rank",
    "tail_table",
    "top_k",
    "top_k_sampled",
    "unit_rows",
    "use_kernels",
    "vote_bytes",
    "warn_if_missing",
]
