"""Computes the randomised Hadamard transform, which spreads every entry over its block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import philox
from ._blockwise_definition import rows_of
from .runtime import cpu, cuda
from .runtime.arguments import check_whole
from .runtime.op import check, op

__all__ = ["hadamard"]

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)


def hadamard(
    x: Tensor,
    out: Tensor,
    block: int,
    random: philox.RandomBits,
    *,
    shard: int | None = None,
    inverse: bool = False,
) -> None:
    """Writes ``H D x / sqrt(block)`` of each block, or with ``inverse`` the inverse of it.

    H is the Hadamard matrix, and D has random signs on its diagonal. The transform is orthonormal,
    and the entries of its result are close to a normal distribution for any x. Kernels equal the
    definition bit for bit: sums are taken in one order.

    Args:
        x: float32, contiguous, a multiple of ``block`` entries.
        out: float32, as many entries. May be ``x``.
        block: entries per block, a power of two from 32 to 2048.
        random: bits for the signs; ``first`` is a multiple of 4096. Row r takes ``random.row(r)``.
        shard: entries per row, a multiple of ``block``; the last may be short. None: one row.
        inverse: applies the inverse transform.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Reference: Ailon and Chazelle, The fast Johnson-Lindenstrauss transform, 2009.
    """
    shard = x.numel() if shard is None else shard
    hadamard_op(x, out, block, inverse, *philox.key_of("hadamard", random), shard)


@op(
    "hadamard(Tensor x, Tensor(a!) out, int block, bool inverse, Tensor step, int seed, int stream,"
    " int first, int shard) -> ()",
    same=[("x", "out")],
)
def hadamard_op(
    x: Tensor,
    out: Tensor,
    block: int,
    inverse: bool,
    step: Tensor,
    seed: int,
    stream: int,
    first: int,
    shard: int,
) -> None:
    rows = [
        philox.signs(
            *(end - begin, int(step), seed, stream, first + row * philox.ROW), device=x.device
        )
        for row, begin, end in rows_of(x.numel(), shard, _rows(x.numel(), shard))
    ]
    _transform(x, out, block, inverse, torch.cat(rows))


def _rows(n: int, shard: int) -> int:
    return max(1, -(-n // max(1, shard)))


def _transform(x: Tensor, out: Tensor, block: int, inverse: bool, signs: Tensor) -> None:
    rows = (x.flatten() if inverse else x.flatten() * signs).view(-1, block)
    # log2(block) steps of sums and differences instead of a product with H, in the kernels' order.
    distance = 1
    while distance < block:
        pairs = rows.view(len(rows), block // (2 * distance), 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack([low + high, low - high], 2).view(-1, block)
        distance *= 2
    # Rounded to float32 before the product, as the kernels' argument is.
    rows = rows * torch.tensor(block**-0.5, dtype=torch.float32, device=x.device)
    out.view(-1).copy_(rows.view(-1) * signs if inverse else rows.view(-1))


@hadamard_op.check
def _check(
    x: Tensor,
    out: Tensor,
    block: int,
    inverse: bool,
    step: Tensor,
    seed: int,
    stream: int,
    first: int,
    shard: int,
) -> None:
    if block not in BLOCKS:
        raise ValueError(f"hadamard(block): one of {', '.join(map(str, BLOCKS))}, got {block!r}")
    check("hadamard", "x", x, like=x, dtypes=(torch.float32,))
    if x.numel() % block:
        raise ValueError(f"hadamard(x): a multiple of {block} entries, got {x.numel()}")
    check("hadamard", "out", out, like=x, dtypes=(torch.float32,), n=x.numel())
    check_signs("hadamard", "random", x, step, seed, stream, first)
    check_whole("hadamard", "shard", shard, 0, 2**56)
    check_whole("hadamard", "rows of a shard", _rows(x.numel(), shard), 1, 2**16)
    if x.numel() > shard and (shard % block or not shard):
        raise ValueError(f"hadamard(shard): a multiple of the block, {block}, got {shard}")


def check_signs(caller: str, name: str, x: Tensor, step: Tensor, *key: int) -> None:
    """Raises unless the key is that of a stream of signs."""
    # 4096 entries share the calls of Philox here, where other draws share them among 256.
    philox.check_key(x, step, *key)
    if key[-1] % philox.SIGNS:
        raise ValueError(f"{caller}({name}): first is a multiple of {philox.SIGNS}, got {key[-1]}")


@hadamard_op.kernel("cpu")
def _hadamard_cpu(x: Tensor, out: Tensor, block: int, inverse: bool, *rest: Any) -> None:
    cpu.call("hadamard", block, x, x.numel(), block**-0.5, inverse, *rest, out)


@hadamard_op.kernel("cuda")
def _hadamard_cuda(x: Tensor, out: Tensor, block: int, inverse: bool, *rest: Any) -> None:
    n, shard = x.numel(), rest[-1]
    arguments = (x, n, block**-0.5, inverse, *rest, out)
    warps = min(n, shard) // max(block, 256) + 1
    cuda.launch("hadamard.cu", f"hadamard<{block}>", x.device, warps, arguments, _rows(n, shard))
