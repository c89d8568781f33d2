"""Adds up sparse payloads: indices and values of some entries of each rank."""

from __future__ import annotations

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, check, op

__all__ = ["scatter_sum"]

_RANGE, _WARPS = 8192, 8  # places of a CUDA block and its warps, as in scatter.cu


def scatter_sum(
    indices: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    factor: float = 1.0,
    finite: Tensor | None = None,
) -> None:
    """Writes the sum of sparse payloads times ``factor`` to ``out``, and zeros elsewhere.

    Products and sums are float32, payload after payload, and rounded to the dtype of ``out`` once.

    Args:
        indices: int32, shape (payloads, k): places in ``out``, ascending within a payload; behind
            them -1 where there is nothing to add. Rows may lie apart, as in gathered payloads.
        values: float32, shape (payloads, k). Rows may lie apart.
        out: float32, float16 or bfloat16, contiguous, at most 2^31 entries.
        factor: multiplies each value.
        finite: one bool; receives whether all of ``out`` is finite.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
            On a GPU wrong places are not found, and nothing is written outside ``out``.
    """
    scatter_sum_op(indices, values, out, factor, finite)


@op(
    "scatter_sum(Tensor indices, Tensor values, Tensor(a!) out, float factor, Tensor(b!)? finite)"
    " -> ()",
    takes={"out": Entries(FLOATS), "finite": Entries(torch.bool, n=1)},
)
def scatter_sum_op(
    indices: Tensor, values: Tensor, out: Tensor, factor: float, finite: Tensor | None
) -> None:
    total = torch.zeros(out.numel(), dtype=torch.float32, device=out.device)
    # Payload by payload: a single index_add_ would add in any order on a GPU.
    for places, entries in zip(indices.long(), values, strict=True):
        count = int((places >= 0).sum())
        places, rest = places[:count], places[count:]
        in_range = not count or 0 <= places[0] <= places[-1] < len(total)
        if not (in_range and (places.diff() > 0).all() and (rest == -1).all()):
            raise ValueError(_wrong_places(len(total)))
        total[places] += entries[:count] * factor
    out.view(-1).copy_(total)
    if finite is not None:
        finite.copy_(out.isfinite().all())


def _wrong_places(n: int) -> str:
    return f"scatter_sum(indices): ascending places below {n}, and -1 behind them; got others"


@scatter_sum_op.check
def _check_scatter_sum(indices: Tensor, values: Tensor, out: Tensor) -> None:
    if out.numel() > 2**31:
        raise ValueError(f"scatter_sum(out): at most 2^31 entries, got {out.numel()}")
    for name, tensor, dtype in (
        ("indices", indices, torch.int32),
        ("values", values, torch.float32),
    ):
        if tensor.dim() != 2 or tensor.shape != indices.shape:
            raise ValueError(f"scatter_sum({name}): shape (payloads, k), got {tuple(tensor.shape)}")
        # Rows are contiguous and may lie apart; none overlap, so that all of them have memory.
        apart = tensor.stride(0) >= tensor.shape[1] and tensor.stride(1) == 1
        rows = tensor[0] if len(tensor) and apart and tensor.numel() else tensor
        check("scatter_sum", name, rows, like=out, dtypes=(dtype,))


@scatter_sum_op.kernel("cpu")
def _scatter_sum_cpu(
    indices: Tensor, values: Tensor, out: Tensor, factor: float, finite: Tensor | None
) -> None:
    # The kernel's position in each payload, then the number of wrong places that it has met.
    state = torch.zeros(len(indices) + 1, dtype=torch.int64, device="cpu")
    source = (indices, indices.stride(0), values, values.stride(0), *indices.shape, factor)
    cpu.call("scatter_sum", *source, cpu.DTYPES[out.dtype], out, out.numel(), finite, state)
    if state[-1]:
        raise ValueError(_wrong_places(out.numel()))


@scatter_sum_op.kernel("cuda")
def _scatter_sum_cuda(
    indices: Tensor, values: Tensor, out: Tensor, factor: float, finite: Tensor | None
) -> None:
    # Wrong places are skipped without an error: to read a count of them back would make the host
    # wait for the GPU.
    source = (indices, indices.stride(0), values, values.stride(0), *indices.shape, factor)
    warps = -(-out.numel() // _RANGE) * _WARPS
    kernel = f"scatter_sum<{cuda.DTYPES[out.dtype]}>"
    arguments = (*source, out, out.numel(), finite, cuda.counters(out.device))
    cuda.launch("scatter.cu", kernel, out.device, warps, arguments)
