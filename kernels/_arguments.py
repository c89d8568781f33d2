"""Values as the kernels of all machines take them."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

__all__ = ["as_ctypes"]


def as_ctypes(value: Tensor | float | None) -> Any:
    """A pointer for a tensor or None, float for a float, int64 for an integer or a bool."""
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_float(value)
