"""Packs and unpacks bitmaps, which say at one bit per entry what a sparse payload holds."""

from __future__ import annotations

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.op import check, op

__all__ = ["pack_bits", "unpack_bits"]


def pack_bits(bits: Tensor, packed: Tensor) -> None:
    """Writes entry i of ``bits`` as bit i % 8 of byte i // 8.

    Args:
        bits: bool, contiguous.
        packed: uint8, one byte per eight bits, rounded up; unused bits of the last byte are zero.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    pack_bits_op(bits, packed)


def unpack_bits(packed: Tensor, bits: Tensor) -> None:
    """Writes to ``bits`` what :func:`pack_bits` packed."""
    unpack_bits_op(packed, bits)


@op("pack_bits(Tensor bits, Tensor(a!) packed) -> ()")
def pack_bits_op(bits: Tensor, packed: Tensor) -> None:
    rows = torch.nn.functional.pad(bits.flatten().to(torch.uint8), (0, -bits.numel() % 8))
    # copy_ narrows the sum of a byte's bits, which is at most 255, from int64 to uint8.
    packed.copy_((rows.view(-1, 8) << _PLACES.to(bits.device)).sum(1).view(packed.shape))


@op("unpack_bits(Tensor packed, Tensor(a!) bits) -> ()")
def unpack_bits_op(packed: Tensor, bits: Tensor) -> None:
    rows = packed.flatten()[:, None] >> _PLACES.to(packed.device) & 1
    bits.copy_(rows.flatten()[: bits.numel()].view(bits.shape))


@pack_bits_op.check
def _check_pack(bits: Tensor, packed: Tensor) -> None:
    check("pack_bits", "bits", bits, like=bits, dtypes=(torch.bool,))
    size = -(-bits.numel() // 8)
    check("pack_bits", "packed", packed, like=bits, dtypes=(torch.uint8,), n=size)


@unpack_bits_op.check
def _check_unpack(packed: Tensor, bits: Tensor) -> None:
    check("unpack_bits", "bits", bits, like=packed, dtypes=(torch.bool,))
    size = -(-bits.numel() // 8)
    check("unpack_bits", "packed", packed, like=packed, dtypes=(torch.uint8,), n=size)


_PLACES = torch.arange(8, dtype=torch.uint8, device="cpu")  # uint8, so that shifts stay uint8


@pack_bits_op.kernel("cpu")
def _pack_cpu(bits: Tensor, packed: Tensor) -> None:
    cpu.call("pack_bits", bits, bits.numel(), packed)


@pack_bits_op.kernel("cuda")
def _pack_cuda(bits: Tensor, packed: Tensor) -> None:
    n = bits.numel()
    cuda.launch("bitmap.cu", "pack_bits", bits.device, n // 256 + 1, (bits, n, packed))


@unpack_bits_op.kernel("cpu")
def _unpack_cpu(packed: Tensor, bits: Tensor) -> None:
    cpu.call("unpack_bits", packed, bits.numel(), bits)


@unpack_bits_op.kernel("cuda")
def _unpack_cuda(packed: Tensor, bits: Tensor) -> None:
    n = bits.numel()
    cuda.launch("bitmap.cu", "unpack_bits", bits.device, n // 256 + 1, (packed, n, bits))
