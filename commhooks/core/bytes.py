"""Reads tensors as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_bytes"]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, flat in row-major order; a view where possible."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # a slice of one entry counts as contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
