"""Selects the largest entries of a bucket."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.op import FEEDBACK, FLOATS, Entries, Rule, op

__all__ = ["top_k", "top_k_sampled"]

_SAMPLE = 8192  # entries, as in sparse.cu and in top_k_sampled of sparse.cpp
_MAX_PADDING = 256  # threads of a CUDA block, of which each writes one
_MARGIN = 1 << 16  # room for candidates beyond 2 k, which a bound from a sample may let through


def top_k(
    x: Tensor,
    k: int,
    indices: Tensor,
    values: Tensor,
    *,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    cleared: Tensor | None = None,
) -> None:
    """Writes the ``k`` entries of largest magnitude of ``x``, or of ``x + residual``.

    The selection is exact and the same on every device: NaN counts as largest, then infinity, and
    among equal magnitudes the lower index wins.

    Args:
        x: float32, float16 or bfloat16, contiguous, fewer than 2^31 entries; worked on as float32.
        k: 0 to ``x.numel()``.
        indices: int32, ``k`` entries; receives the places in ascending order.
        values: float32, ``k`` entries; zeros are written to what it has beyond them, such as the
            padding of a payload.
        residual: float32, as many entries as ``x``; requires ``unsent``.
        unsent: float32, as many entries as ``x``; receives the entries that were not taken, and
            zeros in place of the others. May be ``residual``.
        cleared: float32, as many entries as ``x``; receives zeros where entries were taken, and
            stays as it is elsewhere. May be ``x`` if ``unsent`` is given.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    top_k_op(x, k, indices, values, residual, unsent, cleared)


_SELECTION: dict[str, Rule] = {
    "x": Entries(FLOATS),
    "indices": Entries(torch.int32),
    "values": Entries(torch.float32),
    **FEEDBACK,
    "cleared": Entries(torch.float32, n="x"),
}


@op(
    "top_k(Tensor x, int k, Tensor(a!) indices, Tensor(b!) values, Tensor? residual,"
    " Tensor(c!)? unsent, Tensor(d!)? cleared) -> ()",
    same=[("residual", "unsent"), ("x", "cleared")],
    takes=_SELECTION,
)
def top_k_op(
    x: Tensor,
    k: int,
    indices: Tensor,
    values: Tensor,
    residual: Tensor | None,
    unsent: Tensor | None,
    cleared: Tensor | None,
) -> None:
    c = x.to(torch.float32).flatten()
    if residual is not None:
        c = c + residual.flatten()
    if k:
        magnitude = c.view(torch.int32) & 0x7FFFFFFF  # as integers, NaN is largest
        # topk() may return any of equal magnitudes, so only its threshold is used.
        threshold = magnitude.topk(k).values[-1]
        above, equal = magnitude > threshold, magnitude == threshold
        first = equal.cumsum(0) <= k - above.sum()
        taken = (above | equal & first).nonzero().flatten()
        indices.copy_(taken)
        values[:k].copy_(c[taken])
    values[k:].zero_()
    if unsent is not None:
        unsent.view(-1).copy_(c)
        unsent.view(-1)[indices.long()] = 0.0
    if cleared is not None:
        cleared.view(-1)[indices.long()] = 0.0


def top_k_sampled(
    x: Tensor,
    k: int,
    indices: Tensor,
    values: Tensor,
    *,
    residual: Tensor | None = None,
    unsent: Tensor | None = None,
    cleared: Tensor | None = None,
) -> None:
    """Writes about ``k`` entries of large magnitude: those that reach a threshold from a sample.

    The threshold is the r-th largest of n' = 8192 entries at equal distances, with r two standard
    deviations below k n'/n, so that more than ``k`` entries rarely reach it. If they do, the first
    ``k`` are taken and entries at the end of the bucket are left out. If fewer do, the remaining
    ``indices`` are -1 and ``values`` 0. The selection is the same on every device. Arguments are
    those of :func:`top_k`.

    Reference: Lin et al., Deep Gradient Compression, 2018.
    """
    top_k_sampled_op(x, k, indices, values, residual, unsent, cleared)


@op(
    "top_k_sampled(Tensor x, int k, Tensor(a!) indices, Tensor(b!) values, Tensor? residual,"
    " Tensor(c!)? unsent, Tensor(d!)? cleared) -> ()",
    same=[("residual", "unsent"), ("x", "cleared")],
    takes=_SELECTION,
)
def top_k_sampled_op(
    x: Tensor,
    k: int,
    indices: Tensor,
    values: Tensor,
    residual: Tensor | None,
    unsent: Tensor | None,
    cleared: Tensor | None,
) -> None:
    c = x.to(torch.float32).flatten()
    if residual is not None:
        c = c + residual.flatten()
    taken = c.new_empty(0, dtype=torch.int64)  # for k = 0
    if k:
        magnitude = c.view(torch.int32) & 0x7FFFFFFF
        size, place = _sample(len(c), k)
        # Multiplied before the division, so that the sample reaches the end of the bucket.
        sampled = magnitude[torch.arange(size, device=c.device) * len(c) // size]
        bound = sampled.topk(place).values[-1] if place < size else magnitude.new_zeros(())
        taken = (magnitude >= bound).nonzero().flatten()[:k]
    indices.fill_(-1)
    values.zero_()
    indices.view(-1)[: len(taken)] = taken.to(torch.int32)
    values.view(-1)[: len(taken)] = c[taken]
    if unsent is not None:
        unsent.view(-1).copy_(c)
        unsent.view(-1)[taken] = 0.0
    if cleared is not None:
        cleared.view(-1)[taken] = 0.0


def _sample(n: int, k: int) -> tuple[int, int]:
    """Returns the size of the sample of ``n`` entries, and the rank of the threshold in it."""
    size = min(n, _SAMPLE)
    rank = k * size // n
    return size, size if k == n else max(1, rank - math.isqrt(4 * rank))


# Checks of arguments -------------------------------------------------------------------------


@top_k_op.check
@top_k_sampled_op.check
def _check_selection(
    caller: str,
    x: Tensor,
    k: int,
    indices: Tensor,
    values: Tensor,
    residual: Tensor | None,
    unsent: Tensor | None,
    cleared: Tensor | None,
) -> None:
    n = x.numel()
    if not 0 <= k <= n:
        raise ValueError(f"{caller}(k): 0 to {n}, got {k}")
    if n >= 2**31:
        raise ValueError(f"{caller}(x): fewer than 2^31 entries, got {n}")
    if residual is not None and unsent is None:
        raise ValueError(f"{caller}(unsent): needed with a residual")
    if cleared is not None and unsent is None and cleared.data_ptr() == x.data_ptr():
        raise ValueError(f"{caller}(cleared): needs unsent if it is x")
    if indices.numel() != k:
        raise ValueError(f"{caller}(indices): {k} entries, got {indices.numel()}")
    if not k <= values.numel() < k + _MAX_PADDING:
        raise ValueError(
            f"{caller}(values): {k} entries, and fewer than {_MAX_PADDING} of padding, got "
            f"{values.numel()}"
        )


# CPU kernels ----------------------------------------------------------------------------------


@top_k_op.kernel("cpu")
def _top_k_cpu(
    x: Tensor, k: int, indices: Tensor, values: Tensor, *feedback: Tensor | None
) -> None:
    n = x.numel()
    room = min(n, 2 * k + _MARGIN)
    values[k:].zero_()
    # Indices, values and magnitudes of the candidates; kernels allocate no memory.
    scratch = torch.empty(3, room, dtype=torch.int32, device="cpu")
    results = (indices, values, *feedback)
    cpu.call("top_k", cpu.DTYPES[x.dtype], x, n, k, *results, scratch, room)


@top_k_sampled_op.kernel("cpu")
def _top_k_sampled_cpu(
    x: Tensor, k: int, indices: Tensor, values: Tensor, *feedback: Tensor | None
) -> None:
    values[k:].zero_()
    n, place = x.numel(), _sample(x.numel(), k)[1] if k else 0
    results = (indices, values, *feedback)
    scratch = torch.empty(_SAMPLE, dtype=torch.int32, device="cpu")
    cpu.call("top_k_sampled", cpu.DTYPES[x.dtype], x, n, k, place, *results, scratch)


# CUDA kernels ---------------------------------------------------------------------------------

# As in sparse.cu: entries of a warp in `select` and in `take`, warps of a block, the size of struct
# Work.
_TILE, _TAKE, _WARPS, _WORK_BYTES = 2048, 512, 8, 4 * (12 + 3 * 2048)
_ROUGH = 2048  # entries of the sample of an exact selection, whose bound need not be exact


@top_k_op.kernel("cuda")
def _top_k_cuda(
    x: Tensor, k: int, indices: Tensor, values: Tensor, *feedback: Tensor | None
) -> None:
    n = x.numel()
    if k == 0:
        top_k_op.definition(x, k, indices, values, *feedback)
        return
    # The bound lies four standard deviations beyond the expected rank, so that at least k entries
    # reach it almost always. Where they do not, or where a tile is full, the later stages read the
    # gradient again, so that the host never waits for a count (docs/design/kernels.md).
    size = min(n, _ROUGH)
    rank = k * size / n
    place = int(rank + 4 * rank**0.5) + 8
    room = min(_TILE, 4 * -(-place * _TILE // size) + 32)
    tiles = -(-n // _TILE)
    parts = -(-tiles // _WARPS)
    memory = _WORK_BYTES + 8 * parts + 4 * (1 + 2 * room) * tiles
    work = torch.empty(memory, dtype=torch.uint8, device=x.device)
    t, results = cuda.DTYPES[x.dtype], (indices, values, values.numel() - k)
    sample = f"sample<{t}, {_ROUGH}, true>"
    cuda.launch("sparse.cu", sample, x.device, 1, (x, feedback[0], n, k, place, work, parts))
    arguments = (x, *feedback, n, k, work, room, *results)
    cuda.launch("sparse.cu", f"select<{t}>", x.device, tiles, arguments)


@top_k_sampled_op.kernel("cuda")
def _top_k_sampled_cuda(
    x: Tensor, k: int, indices: Tensor, values: Tensor, *feedback: Tensor | None
) -> None:
    n = x.numel()
    if k == 0:
        top_k_sampled_op.definition(x, k, indices, values, *feedback)
        return
    place, parts, t = _sample(n, k)[1], -(-n // (_TAKE * _WARPS)), cuda.DTYPES[x.dtype]
    work = torch.empty(_WORK_BYTES + 8 * parts, dtype=torch.uint8, device=x.device)
    sample = f"sample<{t}, {_SAMPLE}, false>"
    cuda.launch("sparse.cu", sample, x.device, 1, (x, feedback[0], n, k, place, work, parts))
    arguments = (x, *feedback, n, k, work, indices, values, values.numel() - k)
    cuda.launch("sparse.cu", f"take<{t}>", x.device, parts * _WARPS, arguments)
