"""Computes the discrete cosine transform of chunks of 64 entries."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.op import Entries, op

__all__ = ["CHUNK", "dct"]

CHUNK = 64  # as in DeMo


def dct(x: Tensor, out: Tensor, *, inverse: bool = False) -> None:
    """Writes the orthonormal DCT-II of each chunk of 64 entries, or with ``inverse`` its inverse.

    Kernels equal the definition bit for bit: they take the same steps of a fast transform, of 12
    operations per entry.

    Args:
        x: float32, contiguous, a multiple of 64 entries.
        out: float32, as many entries. May be ``x``.
        inverse: applies the inverse transform.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    References: Ahmed, Natarajan and Rao, Discrete cosine transform, 1974, as used by Peng et al.,
        DeMo, 2024; Plonka and Tasche, Fast and numerically stable algorithms for discrete cosine
        transforms, 2005.
    """
    dct_op(x, out, inverse)


@op(
    "dct(Tensor x, Tensor(a!) out, bool inverse) -> ()",
    same=[("x", "out")],
    takes={"x": Entries(torch.float32), "out": Entries(torch.float32, n="x")},
)
def dct_op(x: Tensor, out: Tensor, inverse: bool) -> None:
    # Not a matrix product: the order of its sums depends on the library and on the processor. The
    # factor, 1 / sqrt(64), is taken first, so that no sum overflows where results do not.
    chunks = x.reshape(-1, CHUNK) * 0.125
    out.view(-1, CHUNK).copy_(_two_back(chunks) if inverse else _two(chunks))


def _two(x: Tensor) -> Tensor:
    """Returns the DCT-II of each row, times the root of its length."""
    half = x.shape[1] // 2
    if not half:
        return x
    # A cosine of even index is the same for an entry and its mirror image; one of odd index has the
    # other sign.
    low, high = x[:, :half], x.flip(1)[:, :half]
    return torch.stack([_two(low + high), _four(low - high)], 2).flatten(1)


def _two_back(y: Tensor) -> Tensor:
    """Returns the transpose of ``_two``: the steps in reverse; a DCT-IV is its own transpose."""
    if y.shape[1] == 1:
        return y
    sums, differences = _two_back(y[:, ::2]), _four(y[:, 1::2])
    return torch.cat([sums + differences, (sums - differences).flip(1)], 1)


def _four(x: Tensor) -> Tensor:
    """Returns the DCT-IV of each row, times the root of its length.

    With an angle t of entry and frequency m, results 2m - 1 and 2m have the cosines of (4m - 1) t
    and (4m + 1) t, which are cos(4mt) cos(t) plus and minus sin(4mt) sin(t): two transforms of half
    the length, of rotated pairs. The sines of 4mt are cosines of another frequency, with signs.
    """
    half = x.shape[1] // 2
    if not half:
        return x
    low, high = x[:, :half], x.flip(1)[:, :half]
    cosines, sines, signs = _rotation(half, x.device)
    a = _two(low * cosines + high * sines)
    b = _two(high * (cosines * signs) - low * (sines * signs)).flip(1)
    inner = torch.stack([a[:, 1:] - b[:, :-1], a[:, 1:] + b[:, :-1]], 2).flatten(1)
    root = 2.0 * _cosine(32)  # of 2
    return torch.cat([a[:, :1] * root, inner, b[:, -1:] * -root], 1)


@cache
def _rotation(half: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    angles = [(2 * j + 1) * (16 // half) for j in range(half)]
    rows = [
        map(_cosine, angles),
        [_cosine(64 - angle) for angle in angles],
        [(-1) ** j for j in range(half)],
    ]
    cosines, sines, signs = (
        torch.tensor(list(r), dtype=torch.float32, device=device) for r in rows
    )
    return cosines, sines, signs


def _cosine(k: int) -> float:
    """Returns cos(k pi / 128); ``kTable`` in dct.h has the same numbers, rounded to float32."""
    return math.cos(k * math.pi / 128)


@dct_op.check
def _check(x: Tensor) -> None:
    if x.numel() % CHUNK:
        raise ValueError(f"dct(x): a multiple of {CHUNK} entries, got {x.numel()}")


@dct_op.kernel("cpu")
def _dct_cpu(x: Tensor, out: Tensor, inverse: bool) -> None:
    cpu.call("dct", x, x.numel(), inverse, out)


@dct_op.kernel("cuda")
def _dct_cuda(x: Tensor, out: Tensor, inverse: bool) -> None:
    name = f"dct<{str(inverse).lower()}>"
    warps = -(-x.numel() // (CHUNK * 32))  # a chunk per lane
    cuda.launch("dct.cu", name, x.device, warps, (x, x.numel(), out))
