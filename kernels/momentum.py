"""Adds gradients to momenta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, op, wide

__all__ = ["add_momentum"]

_ALL = (*FLOATS, torch.float64)


def add_momentum(
    x: Tensor, velocity: Tensor, momentum: float, new: Tensor, out: Tensor | None = None
) -> None:
    """Writes ``x + momentum * velocity``.

    The product is rounded before the sum, and kernels equal the definition bit for bit.

    Args:
        x: float32, float16, bfloat16, or float64 (without kernels), contiguous.
        velocity: float32 (float64 for an ``x`` of float64), as many entries as ``x``.
        new: same dtype, as many entries; receives the sum.
        out: any of these dtypes, as many entries; receives the sum as well. May be ``x``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    add_momentum_op(x, velocity, momentum, new, out)


@op(
    "add_momentum(Tensor x, Tensor velocity, float momentum, Tensor(a!) new, Tensor(b!)? out)"
    " -> ()",
    same=[("x", "out")],
    takes={
        "x": Entries(_ALL),
        "velocity": Entries(wide("x"), n="x"),
        "new": Entries(wide("x"), n="x"),
        "out": Entries(_ALL, n="x"),
    },
)
def add_momentum_op(
    x: Tensor, velocity: Tensor, momentum: float, new: Tensor, out: Tensor | None
) -> None:
    new.view(-1).copy_(x.flatten().to(new.dtype) + velocity.flatten() * momentum)
    if out is not None:
        out.view(-1).copy_(new.view(-1))


@add_momentum_op.beyond_kernels
def _is_double(
    x: Tensor, velocity: Tensor, momentum: float, new: Tensor, out: Tensor | None
) -> bool:
    return x.dtype == torch.float64 or (out is not None and out.dtype == torch.float64)


@add_momentum_op.kernel("cpu")
def _add_momentum_cpu(
    x: Tensor, velocity: Tensor, momentum: float, new: Tensor, out: Tensor | None
) -> None:
    dtypes = (cpu.DTYPES[x.dtype], cpu.DTYPES[torch.float32 if out is None else out.dtype])
    cpu.call("add_momentum", *dtypes, x, velocity, x.numel(), momentum, new, out)


@add_momentum_op.kernel("cuda")
def _add_momentum_cuda(
    x: Tensor, velocity: Tensor, momentum: float, new: Tensor, out: Tensor | None
) -> None:
    types = (cuda.DTYPES[x.dtype], cuda.DTYPES[torch.float32 if out is None else out.dtype])
    arguments: tuple[Any, ...] = (x, velocity, x.numel(), momentum, new, out)
    kernel = "add_momentum<{}, {}>".format(*types)
    cuda.launch("momentum.cu", kernel, x.device, x.numel() // 256 + 1, arguments)
