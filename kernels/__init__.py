"""Ops: numeric primitives of the schemes. The PyTorch definition of an op is its specification."""

from .cast import scaled_cast
from .finite import all_finite
from .low_rank import (
    decode_low_rank,
    multiply_left,
    multiply_right,
    orthonormalize,
    subtract_low_rank,
    unit_rows,
)

__all__ = [
    "all_finite",
    "decode_low_rank",
    "multiply_left",
    "multiply_right",
    "orthonormalize",
    "scaled_cast",
    "subtract_low_rank",
    "unit_rows",
]
