"""The calls of ops that ``cpu_kernels`` and ``gpu_kernels`` time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commhooks.kernels import _op, blockwise, cast, philox, random_k, sparse
from commhooks.kernels.blockwise import payload_bytes
from commhooks.kernels.dct import dct_op
from commhooks.kernels.hadamard import hadamard_op

__all__ = ["COPIED", "Case", "cases"]

COPIED = 8.0  # bytes per entry that a copy of float32 moves
PAYLOADS = {"cpu": 4, "cuda": 8}  # summed by "decode + sum"


@dataclass(frozen=True)
class Case:
    """One op on one set of arguments.

    Attributes:
        bytes: per entry, that it must move.
        goal: share of a copy's bandwidth on a GPU.
        rival: another way to do the same, or less: its name, and a call.
    """

    name: str
    bytes: float
    goal: float
    op: _op.Op
    args: tuple[Any, ...]
    rival: tuple[str, Callable[[], object]] | None = None

    def run(self) -> None:
        """As it is dispatched."""
        self.op(*self.args)

    def define(self) -> None:
        self.op.definition(*self.args)


def cases(x: Tensor, block: int = 1024) -> list[Case]:
    """All ops on a bucket ``x`` of float32, with buffers of their own."""
    out = torch.empty_like(x)
    residual = torch.randn_like(x) * 0.1
    noise = (torch.tensor(1, device=x.device), 1, 0, 0)
    found = [
        one
        for format in ("int8", "int4", "e4m3", "sign")
        for one in _blockwise(x, out, residual, format, block, noise)
    ]
    for narrow in (torch.bfloat16, torch.float16):
        small = torch.empty_like(x, dtype=narrow)
        name = str(narrow).removeprefix("torch.")
        nearest = (x, small, 1 / 3, *philox.NO_STREAM)
        copy = ("torch's copy, unscaled", lambda small=small: small.copy_(x))
        found += [
            Case(f"cast * 1/3, {name}", 6, 0.9, cast.cast_op, nearest, copy),
            Case(f"cast, {name}, stochastic", 6, 0.75, cast.cast_op, (x, small, 1.0, *noise)),
        ]
    whole = x.numel() // 1024 * 1024
    rotated = (x[:whole], out[:whole], 1024, False, *noise)
    found.append(Case("Hadamard 1024", 8, 0.75, hadamard_op, rotated))
    cosines = (x[:whole], torch.randn(64, 64, device=x.device), out[:whole])
    found.append(Case("DCT 64", 8, 0.5, dct_op, cosines))
    k = x.numel() // 100
    taken = (torch.empty(k, dtype=torch.int32, device=x.device), torch.empty(k, device=x.device))
    drawn = (taken[1], residual, residual, *noise[:3])
    found.append(Case("random 1 %, feedback", 12.04, 0.6, random_k.gather_random_op, (x, *drawn)))
    topk = ("torch.topk", lambda: x.abs().topk(k))
    found += [
        Case("top-k 1 %", 4.08, 0.6, sparse.top_k_op, (x, k, *taken, None, None), topk),
        Case(
            "top-k 1 %, feedback",
            12.08,
            0.6,
            sparse.top_k_op,
            (x, k, *taken, residual, residual),
            topk,
        ),
    ]
    return found


def _blockwise(
    x: Tensor, out: Tensor, residual: Tensor, format: str, block: int, noise: tuple[Any, ...]
) -> list[Case]:
    size = payload_bytes(x.numel(), format, block)
    code = size / x.numel()
    payload = torch.empty(size, dtype=torch.uint8, device=x.device)
    quantize = blockwise.quantize_op
    quantize(x, payload, format, block, None, None, *philox.NO_STREAM)
    count = PAYLOADS[x.device.type]
    several = payload.repeat(count, 1)
    encode = (x, payload, format, block)
    decode = (format, block, 1.0, False)
    feedback = (*encode, residual, residual, *philox.NO_STREAM)
    found = [
        Case(f"{format} encode", 4 + code, 0.85, quantize, (*encode, None, None, None, 0, 0, 0)),
        Case(f"{format} encode, feedback", 12 + code, 0.85, quantize, feedback),
        Case(
            f"{format} decode",
            4 + code,
            0.85,
            blockwise.dequantize_op,
            (payload[None], out, *decode),
        ),
        Case(
            f"{format} decode + sum of {count}",
            4 + count * code,
            0.85,
            blockwise.dequantize_op,
            (several, out, *decode),
        ),
    ]
    if format != "sign":
        args = (*encode, None, None, *noise)
        found.append(Case(f"{format} encode, stochastic", 4 + code, 0.75, quantize, args))
    return found
