"""Defines the numeric primitives of schemes, called ops; their PyTorch definitions specify them."""

# Modules, a .py, .cpp and .cu file for each op or family of ops:
#
# blockwise, requantize     int8, int4, fp8, onebit: codes of 1 to 8 bits, a scale for each block
# rotated, hadamard, levels int4, eden: the same after a rotation
# low_rank, orthonormal     powersgd, batched_powersgd, acpsgd
# sparse, scatter           topk, dgc
# momentum                  dgc
# random_k                  random_k
# dct                       demo
# votes                     signsgd
# cast                      fp16 and bf16 with float32 sums
# parts                     averaged error feedback; squared norms
# fingerprint               norms, hashes and sketches, for verification
# affine                    torch's quantization hooks, by minimum and maximum
# norms, shared             schemes of commhooks.research.baselines
# finite, restore           whether a step is finite, and what its commit keeps
# philox, segments          random bits; where blocks begin in a bucket
# _blockwise, _blockwise_definition, _matrices, _tables, _tail, _tiles  what these share
# runtime                   how ops are declared, checked, built and called

from .affine import dequantize_affine, quantize_affine
from .blockwise import FORMATS, dequantize, payload_bytes, quantize, segments_for
from .cast import scaled_cast
from .dct import Tiles, decode_cosines, encode_cosines
from .fingerprint import fingerprint, hash_parts, pieces_of_sizes, sketch_width
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
from .momentum import add_momentum
from .norms import quantize_norms
from .orthonormal import orthonormalize, unit_rows
from .parts import dequantize_parts, part_bytes, quantize_parts, squared_norms
from .philox import RandomBits
from .random_k import gather_random, random_places, scatter_random
from .requantize import requantize
from .restore import restore
from .rotated import dequantize_rotated, quantize_rotated
from .runtime.op import implementations, op, use_kernels
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
    "Tiles",
    "add_momentum",
    "all_finite",
    "count_votes",
    "decode_cosines",
    "decode_low_rank",
    "dequantize",
    "dequantize_affine",
    "dequantize_levels",
    "dequantize_parts",
    "dequantize_rotated",
    "dequantize_shared",
    "encode_cosines",
    "fingerprint",
    "gather_random",
    "hadamard",
    "hash_parts",
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
    "pieces_of_sizes",
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
    "sketch_width",
    "squared_norms",
    "subtract_low_rank",
    "tail_table",
    "top_k",
    "top_k_sampled",
    "unit_rows",
    "use_kernels",
    "vote_bytes",
]
