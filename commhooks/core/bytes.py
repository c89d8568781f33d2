"""Reads tensors as bytes."""

from __future__ import annotations

import ctypes
import zlib

import torch
from torch import Tensor

__all__ = ["as_bytes", "crc32"]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, flat in row-major order; a view where possible."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # a slice of one entry counts as contiguous, whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def crc32(body: Tensor, start: int = 0) -> int:
    """Computes the CRC-32 of the bytes of a tensor on the CPU.

    Args:
        start: checksum of the bytes before these, which this one continues.
    """
    body = body.contiguous()
    # zlib takes objects with the buffer protocol, which tensors do not have.
    return zlib.crc32(ctypes.string_at(body.data_ptr(), body.nbytes), start)
