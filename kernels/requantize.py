"""Decodes payloads, sums them and quantises the sum: the middle of a two-phase exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _blockwise_definition as definition
from . import philox
from ._blockwise_checks import check_feedback, check_message, check_messages
from ._blockwise_formats import FORMATS, Payload, layout_of
from .blockwise import aligned, parts, quantize_op, warp_entries
from .runtime import cpu, cuda
from .runtime.arguments import check_whole
from .runtime.op import op

__all__ = ["requantize"]


def requantize(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    *,
    shard: int | None = None,
    factor: float = 1.0,
    unsent: Tensor | None = None,
    weight: float = 1.0,
    accumulate: bool = False,
    random: philox.RandomBits | None = None,
) -> None:
    """Quantises the sum of the decoded payloads, as in the middle of a two-phase exchange.

    The sum does not pass through memory. Other arguments are those of ``dequantize`` and
    ``quantize``.

    Args:
        payloads: uint8, shape (ranks, bytes).
        payload: uint8, ``bytes`` entries.
        n: number of entries, ``shard`` at most.
        shard: entries of a full payload, whose layout all payloads have; ``n`` by default.
        unsent: float32, ``n`` entries; receives ``weight`` times what was not sent.
        accumulate: adds to ``unsent`` instead.
    """
    key = philox.key_of("requantize", random)
    rest = (n if shard is None else shard, factor, unsent, weight, accumulate)
    requantize_op(payloads, payload, n, format, block, *rest, *key)


@op(
    "requantize(Tensor payloads, Tensor(a!) payload, int n, str format, int block, int shard,"
    " float factor, Tensor(b!)? unsent, float weight, bool accumulate, Tensor? step, int seed,"
    " int stream, int first) -> ()",
)
def requantize_op(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    shard: int,
    factor: float,
    unsent: Tensor | None,
    weight: float,
    accumulate: bool,
    *key: Any,
) -> None:
    total = definition.sum_payloads(payloads, Payload(FORMATS[format], block, shard), n) * factor
    error = torch.empty_like(total)
    # The definition rather than the op, since a definition runs no kernel in any mode.
    quantize_op.definition(total, payload, format, block, shard, None, error, *key)
    if unsent is not None:
        error = (error * weight).view(unsent.shape)
        unsent.copy_(unsent + error if accumulate else error)


@requantize_op.check
def _check_requantize(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    shard: int,
    factor: float,
    unsent: Tensor | None,
    weight: float,
    accumulate: bool,
    step: Tensor | None,
    *key: int,
) -> None:
    check_whole("requantize", "n", n, 0, 2**56)
    check_messages("requantize", payloads, format, block, shard, n, most=2)
    check_message("requantize", payload, format, block, shard, n, payloads, most=1)
    check_feedback("requantize", payloads, n, None, unsent)
    philox.check_key(payloads, step, *key)


@requantize_op.kernel("cpu")
def _requantize_cpu(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    shard: int,
    factor: float,
    *rest: Any,
) -> None:
    layout = layout_of("requantize", format, block, shard)
    source = (payloads, payloads.stride(0), len(payloads), factor, n)
    cpu.call("requantize", layout.format.number, block, *source, *rest, *parts(payload, layout))


@requantize_op.kernel("cuda")
def _requantize_cuda(
    payloads: Tensor,
    payload: Tensor,
    n: int,
    format: str,
    block: int,
    shard: int,
    factor: float,
    *rest: Any,
) -> None:
    layout = layout_of("requantize", format, block, shard)
    name = f"requantize<{layout.format.cpp}, {block}>"
    source = (aligned(payloads), payloads.stride(0), len(payloads), factor, n)
    arguments = (*source, *rest, *parts(aligned(payload), layout))
    cuda.launch("blockwise.cu", name, payloads.device, n // warp_entries(block) + 1, arguments)
