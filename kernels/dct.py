"""Computes the discrete cosine transform of chunks of 64 entries."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.arguments import as_flag, as_tensor
from .runtime.op import check, op

__all__ = ["CHUNK", "dct"]

CHUNK = 64  # as in DeMo


def dct(x: Tensor, out: Tensor, *, inverse: bool = False) -> None:
    """Writes the orthonormal DCT-II of each chunk of 64 entries, or with ``inverse`` its inverse.

    Kernels equal the definition bit for bit: products are added one after the other.

    Args:
        x: float32, contiguous, a multiple of 64 entries.
        out: float32, as many entries. May be ``x``.
        inverse: applies the inverse transform.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Ahmed, Natarajan and Rao, Discrete cosine transform, 1974; as used by Peng et al.,
        DeMo, 2024.
    """
    # An argument of the op: kernels compute no cosines, whose bits differ between libraries.
    device = as_tensor("dct", "x", x).device
    dct_op(x, _columns(device, as_flag("dct", "inverse", inverse)), out)


@cache
def _columns(device: torch.device, inverse: bool) -> Tensor:
    """Returns the matrix of the transform: row i holds the factors of entry i in all results."""
    # In float64, so that float32 entries are those nearest to the true cosines on every machine.
    i = torch.arange(CHUNK, dtype=torch.float64, device="cpu")
    angles = math.pi * (i[:, None] + 0.5) * i / CHUNK
    columns = torch.cos(angles) * math.sqrt(2 / CHUNK)
    columns[:, 0] /= math.sqrt(2)
    return (columns.T if inverse else columns).to(torch.float32).contiguous().to(device)


@op("dct(Tensor x, Tensor columns, Tensor(a!) out) -> ()", same=[("x", "out")])
def dct_op(x: Tensor, columns: Tensor, out: Tensor) -> None:
    # Not a matrix product: the order of its sums depends on the library and on the processor.
    chunks = x.reshape(-1, CHUNK)
    total = chunks[:, :1] * columns[0]
    for i in range(1, CHUNK):
        total = total + chunks[:, i : i + 1] * columns[i]
    out.view(-1, CHUNK).copy_(total)


@dct_op.check
def _check(x: Tensor, columns: Tensor, out: Tensor) -> None:
    check("dct", "x", x, like=x, dtypes=(torch.float32,))
    if x.numel() % CHUNK:
        raise ValueError(f"dct(x): a multiple of {CHUNK} entries, got {x.numel()}")
    check("dct", "columns", columns, like=x, dtypes=(torch.float32,), n=CHUNK * CHUNK)
    check("dct", "out", out, like=x, dtypes=(torch.float32,), n=x.numel())


@dct_op.kernel("cpu")
def _dct_cpu(x: Tensor, columns: Tensor, out: Tensor) -> None:
    cpu.call("dct", x, x.numel(), columns, out)


@dct_op.kernel("cuda")
def _dct_cuda(x: Tensor, columns: Tensor, out: Tensor) -> None:
    cuda.launch("dct.cu", "dct", x.device, x.numel() // CHUNK + 1, (x, x.numel(), columns, out))
