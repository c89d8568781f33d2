"""Selects random entries at places that every rank computes from a shared key.

The bucket is cut into k strata of nearly equal length, and one entry is drawn uniformly from each.
Places ascend and are all different, and an entry of a stratum of length L is taken with probability
1/L.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import philox
from .runtime import cpu, cuda
from .runtime.op import FEEDBACK, FLOATS, Entries, op

__all__ = ["gather_random", "random_places", "scatter_random"]


def random_places(
    n: int, k: int, step: int, seed: int, stream: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns ascending places of ``k`` of ``n`` entries as int64: the specification of the draw.

    Stratum j begins at floor(j n / k). The place within it is its length times word (j // 32) % 4
    of call j % 32 of each group of 128 strata, over 2^32.
    """
    j = torch.arange(k, device=device)
    begin, end = j * n // max(k, 1), (j + 1) * n // max(k, 1)
    # A product and a shift instead of a remainder: no division, and a bias below length / 2^32.
    words = philox.words(k, step, seed, stream, device=device)
    return begin + (words * (end - begin) >> 32)


def gather_random(
    x: Tensor,
    values: Tensor,
    random: philox.RandomBits,
    *,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
) -> None:
    """Writes ``values.numel()`` random entries of ``x``, or of ``x + residual``.

    NaN is written in place of an entry whose stratum has one that is not finite, drawn or not: so a
    sum of the values of all ranks shows whether every entry of every rank is finite.

    Args:
        x: float32, float16 or bfloat16, contiguous, fewer than 2^31 entries.
        values: float32, at most as many entries as ``x``.
        random: the same key on all ranks; ``first`` is 0.
        residual: float32, as many entries as ``x``; requires ``unsent``.
        unsent: float32, as many entries as ``x``; receives the entries that were not taken, and
            zeros in place of the others. May be ``residual``.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    gather_random_op(x, values, residual, unsent, *_key("gather_random", random))


def scatter_random(
    values: Tensor,
    out: Tensor,
    random: philox.RandomBits,
    *,
    factor: float = 1.0,
    finite: Tensor | None = None,
) -> None:
    """Writes ``values * factor`` to the places of ``gather_random``, and zeros to all others.

    Args:
        values: float32.
        out: float32, float16 or bfloat16, as many entries as ``x`` had.
        random: the key given to ``gather_random``.
        factor: multiplies the values. ``out.numel() / values.numel()`` makes the result unbiased if
            it is an integer, so that all strata are equally long.
        finite: one bool; if it is false, all of ``out`` becomes NaN.
    """
    scatter_random_op(values, out, factor, finite, *_key("scatter_random", random))


def _key(caller: str, random: philox.RandomBits) -> tuple[Tensor | None, int, int]:
    step, seed, number, first = philox.key_of(caller, random)
    if first:
        # Strata depend on the size of the whole bucket, so there are no slices.
        raise ValueError(f"{caller}(random): first is 0, got {first}")
    return step, seed, number


@op(
    "gather_random(Tensor x, Tensor(a!) values, Tensor? residual, Tensor(b!)? unsent, Tensor step,"
    " int seed, int stream) -> ()",
    same=[("residual", "unsent")],
    takes={
        "x": Entries(FLOATS),
        "values": Entries(torch.float32),
        **FEEDBACK,
    },
)
def gather_random_op(
    x: Tensor,
    values: Tensor,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor,
    *key: int,
) -> None:
    c = x.to(torch.float32).flatten()
    if residual is not None:
        c = c + residual.flatten()
    places = random_places(x.numel(), values.numel(), int(step), *key, device=x.device)
    values.view(-1).copy_(c[places])
    begin = torch.arange(values.numel() + 1, device=x.device) * x.numel() // max(values.numel(), 1)
    bad_before = torch.cat([begin.new_zeros(1), (~c.isfinite()).cumsum(0)])[begin]
    values.view(-1)[bad_before.diff() > 0] = torch.nan
    if unsent is not None:
        unsent.view(-1).copy_(c)
        unsent.view(-1)[places] = 0.0


@op(
    "scatter_random(Tensor values, Tensor(a!) out, float factor, Tensor? finite, Tensor step,"
    " int seed, int stream) -> ()",
    takes={
        "values": Entries(torch.float32),
        "out": Entries(FLOATS),
        "finite": Entries(torch.bool, n=1),
    },
)
def scatter_random_op(
    values: Tensor, out: Tensor, factor: float, finite: Tensor | None, step: Tensor, *key: int
) -> None:
    places = random_places(out.numel(), values.numel(), int(step), *key, device=out.device)
    out.zero_()
    out.view(-1)[places] = (values.flatten() * factor).to(out.dtype)
    if finite is not None:
        out.masked_fill_(~finite, torch.nan)


# Checks of arguments -------------------------------------------------------------------------


@gather_random_op.check
def _check_gather(
    x: Tensor,
    values: Tensor,
    residual: Tensor | None,
    unsent: Tensor | None,
    step: Tensor,
    *key: int,
) -> None:
    _check_sizes("gather_random", x.numel(), values.numel())
    if residual is not None and unsent is None:
        raise ValueError("gather_random(unsent): needed with a residual")
    philox.check_key(x, step, *key)


@scatter_random_op.check
def _check_scatter(values: Tensor, out: Tensor, step: Tensor, *key: int) -> None:
    _check_sizes("scatter_random", out.numel(), values.numel())
    philox.check_key(out, step, *key)


def _check_sizes(caller: str, n: int, k: int) -> None:
    if k > n:
        raise ValueError(f"{caller}(values): at most {n} entries, got {k}")
    if n >= 2**31:
        # The product of a word of 32 bits and a length has to fit into a signed 64-bit integer.
        raise ValueError(f"{caller}: fewer than 2^31 entries, got {n}")


# Kernels --------------------------------------------------------------------------------------


@gather_random_op.kernel("cpu")
def _gather_random_cpu(
    x: Tensor, values: Tensor, residual: Tensor | None, unsent: Tensor | None, *key: Any
) -> None:
    source = (cpu.DTYPES[x.dtype], x, x.numel(), residual, unsent)
    cpu.call("gather_random", *source, *key, values, values.numel())


@gather_random_op.kernel("cuda")
def _gather_random_cuda(
    x: Tensor, values: Tensor, residual: Tensor | None, unsent: Tensor | None, *key: Any
) -> None:
    if not values.numel():
        gather_random_op.definition(x, values, residual, unsent, *key)
        return
    each = _strata_of_warp(x.numel(), values.numel())
    source, sizes = (x, x.numel(), residual, unsent), (values, values.numel(), each)
    kernel, warps = f"gather_random<{cuda.DTYPES[x.dtype]}>", -(-values.numel() // each)
    cuda.launch("random_k.cu", kernel, x.device, warps, (*source, *key, *sizes))


@scatter_random_op.kernel("cpu")
def _scatter_random_cpu(
    values: Tensor, out: Tensor, factor: float, finite: Tensor | None, *key: Any
) -> None:
    result = (cpu.DTYPES[out.dtype], out, out.numel())
    cpu.call("scatter_random", values, values.numel(), factor, finite, *key, *result)


@scatter_random_op.kernel("cuda")
def _scatter_random_cuda(
    values: Tensor, out: Tensor, factor: float, finite: Tensor | None, *key: Any
) -> None:
    if not values.numel():
        scatter_random_op.definition(values, out, factor, finite, *key)
        return
    each = _strata_of_warp(out.numel(), values.numel())
    arguments = (values, values.numel(), factor, finite, *key, out, out.numel(), each)
    kernel, warps = f"scatter_random<{cuda.DTYPES[out.dtype]}>", -(-values.numel() // each)
    cuda.launch("random_k.cu", kernel, out.device, warps, arguments)


def _strata_of_warp(n: int, k: int) -> int:
    """Returns how many strata a warp takes: about 2048 entries, one stratum at least."""
    return max(1, 2048 * k // n)
