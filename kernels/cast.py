"""Scales and casts in one pass over memory, rounding to nearest or stochastically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import philox
from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, check, op

__all__ = ["scaled_cast", "stochastic"]

_ALL = (*FLOATS, torch.float64)


def scaled_cast(
    x: Tensor, scale: float, out: Tensor, *, random: philox.RandomBits | None = None
) -> Tensor:
    """Writes ``x * scale``, rounded to the dtype of ``x`` and then to that of ``out``, to ``out``.

    Kernels equal the definition bit for bit. Each byte of ``x`` and ``out`` passes through memory
    once.

    Args:
        x: floating point, contiguous, any shape. For float64 the definition runs.
        out: floating point, contiguous, as many entries as ``x``. May be ``x``.
        random: bits for stochastic rounding, which is unbiased; requires ``x`` of float32 and
            ``out`` of float16 or bfloat16. None rounds to nearest.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    cast_op(x, out, scale, *philox.key_of("scaled_cast", random))
    return out


@op(
    "cast(Tensor x, Tensor(a!) out, float scale, Tensor? step, int seed, int stream,"
    " int first) -> ()",
    caller="scaled_cast",
    same=[("x", "out")],
    takes={"x": Entries(_ALL), "out": Entries(_ALL, n="x")},
)
def cast_op(x: Tensor, out: Tensor, scale: float, step: Tensor | None, *key: int) -> None:
    # Rounded to the dtype of x first, as torch's product is: the kernels do the same, so that they
    # may replace `x * scale` followed by a copy without changing a bit.
    scaled = (x if scale == 1.0 else x * scale).view(out.shape)
    if step is not None:
        noise = philox.half_words(x.numel(), int(step), *key, device=x.device)
        scaled = stochastic(scaled, out.dtype, noise.view(out.shape).to(torch.int32))
    out.copy_(scaled)


def stochastic(x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Rounds to ``dtype`` stochastically: adds random bits below the last place and truncates.

    The result is float32. Infinity and NaN stay as they are; numbers between the largest finite one
    of ``dtype`` and the next power of two become one of the two, the latter as infinity.
    """
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # A carry out of the mantissa is the next exponent, which is the next number of the format.
    if dtype == torch.bfloat16:
        cut = (magnitude + noise) & ~0xFFFF
    else:
        normal = (magnitude + (noise >> 3)) & ~0x1FFF
        # Below 2^-14 the numbers of float16 are multiples of 2^-24.
        places = (x.abs() * 2.0**24 + philox.centred(noise)).round().abs() * 2.0**-24
        cut = torch.where(magnitude < 113 << 23, places.view(torch.int32), normal)
    # Truncation may turn NaN into infinity, and noise may carry its bits into the sign.
    cut = torch.where(magnitude >= 0x7F800000, magnitude, cut)
    return (cut | bits & ~0x7FFFFFFF).view(torch.float32)


@cast_op.check
def _check(x: Tensor, out: Tensor, step: Tensor | None, *key: int) -> None:
    if step is not None:  # stochastic rounding
        check("scaled_cast", "x", x, like=x, dtypes=(torch.float32,))
        check("scaled_cast", "out", out, like=x, dtypes=(torch.float16, torch.bfloat16))
    philox.check_key(x, step, *key)


@cast_op.beyond_kernels
def _is_double(x: Tensor, out: Tensor, *rest: Any) -> bool:
    return x.dtype == torch.float64 or out.dtype == torch.float64


@cast_op.kernel("cpu")
def _cast_cpu(x: Tensor, out: Tensor, scale: float, *key: Any) -> None:
    dtypes = (cpu.DTYPES[x.dtype], cpu.DTYPES[out.dtype])
    cpu.call("cast", *dtypes, x, x.numel(), scale, *key, out)


@cast_op.kernel("cuda")
def _cast_cuda(x: Tensor, out: Tensor, scale: float, *key: Any) -> None:
    name = f"cast<{cuda.DTYPES[x.dtype]}, {cuda.DTYPES[out.dtype]}>"
    arguments = (x, x.numel(), scale, *key, out)
    cuda.launch("cast.cu", name, x.device, x.numel() // 256 + 1, arguments)
