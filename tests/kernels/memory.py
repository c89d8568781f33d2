"""Memory beside which lies some that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap

import torch

__all__ = ["PAGE", "between_guards"]

PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python names since 3.13


def between_guards(size: int, guard: int, *, before: bool = False) -> torch.Tensor:
    """``size`` bytes of zeros, both a multiple of a page; pages take memory once they are written.

    Args:
        guard: bytes behind them where any access is a fault.
        before: whether there are as many before them.
    """
    begin = guard if before else 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = torch.frombuffer(  # which keeps the mapping
        mmap.mmap(-1, begin + size + guard, flags=flags), dtype=torch.uint8
    )
    for at in {0, begin + size} if before else {size}:
        place = ctypes.c_void_p(memory.data_ptr() + at)
        if ctypes.CDLL(None).mprotect(place, ctypes.c_size_t(guard), 0):
            raise OSError("mprotect failed")
    return memory[begin : begin + size]
