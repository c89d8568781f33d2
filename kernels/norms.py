"""Norms and finite checks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .runtime import cpu, cuda
from .runtime.op import check, op

__all__ = ["all_finite", "norms"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK, _PARTIALS = 4096, 256  # as in norms.h


def all_finite(x: Tensor) -> Tensor:
    """Whether every entry of ``x`` is finite, as one bool on its device; true for no entries."""
    answer = torch.ones((), dtype=torch.bool, device=x.device)
    finite_op(x, answer)
    return answer


def norms(x: Tensor, out: Tensor) -> None:
    """Writes the sum of magnitudes, the sum of squares and the largest magnitude of ``x``.

    One pass. Sums are in float64 and in one order, so that all machines get the same bits. The
    largest is NaN or infinity if an entry is.

    Args:
        x: float32, float16 or bfloat16, contiguous.
        out: float64, 3 entries.

    Raises:
        TypeError, ValueError: a tensor of another dtype, size or device; names the argument.
    """
    norms_op(x, out)


@op("finite(Tensor x, Tensor(a!) answer) -> ()", caller="all_finite")
def finite_op(x: Tensor, answer: Tensor) -> None:
    if x.numel():
        # aminmax passes NaN on, and takes a tenth of the time of isfinite(x).all().
        low, high = torch.aminmax(x)
        answer.copy_(torch.isfinite(low) & torch.isfinite(high))


@op("norms(Tensor x, Tensor(a!) out) -> ()")
def norms_op(x: Tensor, out: Tensor) -> None:
    magnitudes = x.flatten().abs().double()
    rows = pad(magnitudes, (0, -x.numel() % _CHUNK)).view(-1, _CHUNK // 32, 32)
    for i, terms in enumerate((rows, rows.square())):
        sums = torch.zeros(len(rows), 32, dtype=torch.float64, device=x.device)
        for row in terms.unbind(1):  # entry j of a chunk goes to sum j % 32
            sums = sums + row
        chunks = _halved(sums)
        chunks = pad(chunks, (0, -len(chunks) % _PARTIALS)).view(-1, _PARTIALS)
        total = torch.zeros(1, _PARTIALS, dtype=torch.float64, device=x.device)
        for row in chunks.unbind(0):
            total = total + row
        out[i] = _halved(total)[0]
    out[2] = magnitudes.amax() if x.numel() else 0.0


def _halved(sums: Tensor) -> Tensor:
    """Sums of rows: halves are added to halves."""
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


@finite_op.law
def _check_finite(x: Tensor, answer: Tensor) -> None:
    check("all_finite", "answer", answer, like=x, dtypes=(torch.bool,), n=1)


@finite_op.beyond_kernels
def _is_other(x: Tensor, answer: Tensor) -> bool:
    return x.dtype not in _DTYPES or not x.is_contiguous()


@norms_op.law
def _check_norms(x: Tensor, out: Tensor) -> None:
    check("norms", "x", x, like=x, dtypes=_DTYPES)
    check("norms", "out", out, like=x, dtypes=(torch.float64,), n=3)


@finite_op.kernel("cpu")
def _finite_cpu(x: Tensor, answer: Tensor) -> None:
    cpu.call("finite", cpu.DTYPES[x.dtype], x, x.numel(), answer)


@finite_op.kernel("cuda")
def _finite_cuda(x: Tensor, answer: Tensor) -> None:
    answer.fill_(True)
    arguments = (x, x.numel(), answer)
    cuda.launch("norms.cu", f"finite<{cuda.DTYPES[x.dtype]}>", x.device, _tasks(x), arguments)


@norms_op.kernel("cpu")
def _norms_cpu(x: Tensor, out: Tensor) -> None:
    cpu.call("norms", cpu.DTYPES[x.dtype], x, x.numel(), out)


@norms_op.kernel("cuda")
def _norms_cuda(x: Tensor, out: Tensor) -> None:
    sums = torch.empty(3 * _tasks(x), dtype=torch.float64, device=x.device)
    arguments = (x, x.numel(), sums)
    cuda.launch("norms.cu", f"norms<{cuda.DTYPES[x.dtype]}>", x.device, _tasks(x), arguments)
    cuda.launch("norms.cu", "add_norms", x.device, 1, (sums, _tasks(x), out))


def _tasks(x: Tensor) -> int:
    return -(-x.numel() // _CHUNK)
