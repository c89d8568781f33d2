"""Sparse ops: the largest entries of a bucket, and values at indices."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _cpu, _cuda
from ._op import check, op

__all__ = ["scatter_add", "top_k"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MARGIN = 1 << 16  # candidates beyond twice k that a threshold from a sample may let through


def top_k(
    x: Tensor,
    k: int,
    indices: Tensor,
    values: Tensor,
    *,
    residual: Tensor | None = None,
    left: Tensor | None = None,
) -> None:
    """Writes the ``k`` entries of ``x``, or of ``x + residual``, of largest magnitude.

    Exact and the same everywhere: NaN counts as largest, then infinity; of equal magnitudes the
    first come first.

    Args:
        x: float32, float16 or bfloat16, contiguous, fewer than 2^31 entries; worked on as float32.
        k: 0 to ``x.numel()``.
        indices: int32, ``k`` of them; get ascending places.
        values: float32, ``k`` of them.
        residual: float32, as many entries as ``x``; needs ``left``.
        left: float32, as many; gets all entries that were not taken, and zeros where they were.
            May be ``residual``.

    Raises:
        TypeError, ValueError: a tensor of another dtype, size or device; names the argument.
    """
    n = x.numel()
    check("top_k", "x", x, like=x, dtypes=_DTYPES)
    if not 0 <= k <= n:
        raise ValueError(f"top_k(k): 0 to {n}, got {k}")
    if n >= 2**31:
        raise ValueError(f"top_k(x): fewer than 2^31 entries, got {n}")
    if residual is not None and left is None:
        raise ValueError("top_k(left): needed with a residual")
    check("top_k", "indices", indices, like=x, dtypes=(torch.int32,), n=k)
    check("top_k", "values", values, like=x, dtypes=(torch.float32,), n=k)
    for name, tensor in (("residual", residual), ("left", left)):
        if tensor is not None:
            check("top_k", name, tensor, like=x, dtypes=(torch.float32,), n=n)
    top_k_op(x, k, indices, values, residual, left)


@op(
    "top_k(Tensor x, int k, Tensor(a!) indices, Tensor(b!) values, Tensor? residual,"
    " Tensor(c!)? left) -> ()"
)
def top_k_op(
    x: Tensor, k: int, indices: Tensor, values: Tensor, residual: Tensor | None, left: Tensor | None
) -> None:
    c = x.to(torch.float32).flatten()
    if residual is not None:
        c = c + residual.flatten()
    if k:
        magnitude = c.view(torch.int32) & 0x7FFFFFFF  # orders as the values do, NaN last
        threshold = magnitude.topk(k).values[-1]
        above, equal = magnitude > threshold, magnitude == threshold
        first = equal.cumsum(0) <= k - above.sum()
        taken = (above | equal & first).nonzero().flatten()
        indices.copy_(taken)
        values.copy_(c[taken])
    if left is not None:
        left.view(-1).copy_(c)
        left.view(-1)[indices.long()] = 0.0


def scatter_add(indices: Tensor, values: Tensor, out: Tensor, *, factor: float = 1.0) -> None:
    """Adds ``values * factor`` at ``indices`` to ``out``, one payload after the other.

    Args:
        indices: int32, shape (payloads, k); within a payload all different and inside ``out``.
        values: float32, shape (payloads, k).
        out: float32, contiguous.

    Raises:
        TypeError, ValueError: a tensor of another dtype, size or device; names the argument.
    """
    check("scatter_add", "indices", indices, like=out, dtypes=(torch.int32,))
    check("scatter_add", "values", values, like=out, dtypes=(torch.float32,), n=indices.numel())
    check("scatter_add", "out", out, like=out, dtypes=(torch.float32,))
    if indices.dim() != 2:
        raise ValueError(f"scatter_add(indices): shape (payloads, k), got {tuple(indices.shape)}")
    scatter_add_op(indices, values, out, factor)


@op("scatter_add(Tensor indices, Tensor values, Tensor(a!) out, float factor) -> ()")
def scatter_add_op(indices: Tensor, values: Tensor, out: Tensor, factor: float) -> None:
    flat = out.view(-1)
    for places, entries in zip(indices.long(), values.view(indices.shape), strict=True):
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < flat.numel():
            raise ValueError(f"scatter_add(indices): places below {flat.numel()}, got others")
        flat[places] += entries * factor


# CPU kernels ----------------------------------------------------------------------------------


@top_k_op.kernel("cpu")
def _top_k_cpu(
    x: Tensor, k: int, indices: Tensor, values: Tensor, residual: Tensor | None, left: Tensor | None
) -> None:
    n = x.numel()
    room = min(n, 2 * k + _MARGIN)
    scratch = torch.empty(3, room, dtype=torch.int32)
    results = (indices, values, residual, left)
    _cpu.call("top_k", _cpu.DTYPES[x.dtype], x, n, k, *results, scratch, room)


@scatter_add_op.kernel("cpu")
def _scatter_add_cpu(indices: Tensor, values: Tensor, out: Tensor, factor: float) -> None:
    outside = torch.zeros((), dtype=torch.int64)
    source = (indices, values, indices.numel(), factor)
    _cpu.call("scatter_add", *source, out, out.numel(), outside)
    if outside:
        raise ValueError(f"scatter_add(indices): places below {out.numel()}, got others")


# CUDA kernels ---------------------------------------------------------------------------------

_TILE, _SAMPLE, _WORK_BYTES = 2048, 8192, 4 * (8 + 3 * 2048)  # as in sparse.cu


@top_k_op.kernel("cuda")
def _top_k_cuda(
    x: Tensor, k: int, indices: Tensor, values: Tensor, residual: Tensor | None, left: Tensor | None
) -> None:
    n = x.numel()
    if k == 0:
        top_k_op.definition(x, k, indices, values, residual, left)
        return
    size = min(n, _SAMPLE)
    rank = k * size / n
    place = int(rank + 4 * rank**0.5) + 8
    room = min(_TILE, 4 * -(-place * _TILE // size) + 32)
    tiles = -(-n // _TILE)
    work = torch.empty(_WORK_BYTES + 4 * (3 + 2 * room) * tiles, dtype=torch.uint8, device=x.device)
    t = _cuda.DTYPES[x.dtype]
    again = (x, left, n, k, work, room)

    def launch(name: str, warps: int, *arguments: Tensor | float | None) -> None:
        _cuda.launch("sparse.cu", name, x.device, warps, arguments)

    one_block = 1
    launch(f"sample<{t}>", one_block, x, residual, n, k, place, work)
    launch(f"collect<{t}>", tiles, x, residual, left, n, work, room)
    for digit in range(3):
        launch(f"histogram<{t}, {digit}>", tiles, *again)
    launch(f"count<{t}>", tiles, *again)
    launch("scan", one_block, n, work, room)
    launch(f"emit<{t}>", tiles, *again, indices, values)


@scatter_add_op.kernel("cuda")
def _scatter_add_cuda(indices: Tensor, values: Tensor, out: Tensor, factor: float) -> None:
    """One launch per payload: sums are taken in their order. Places outside are left out."""
    for places, entries in zip(indices, values.view(indices.shape), strict=True):
        arguments = (places, entries, places.numel(), factor, out, out.numel())
        warps = -(-places.numel() // 32)
        _cuda.launch("sparse.cu", "scatter_add", out.device, warps, arguments)
