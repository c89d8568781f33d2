"""Decodes payloads, sums them and quantises the sum: the middle of a two-phase exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _blockwise_definition as definition
from . import philox
from ._blockwise import check_draws, check_message, check_messages, layout_for, message_of
from ._tables import on_device
from .blockwise import aligned, draws_of, quantize_op, table_for, warp_entries
from .runtime import cpu, cuda
from .runtime.arguments import check_whole
from .runtime.op import Entries, op
from .segments import Segments, segments_of

__all__ = ["requantize"]


def requantize(
    payloads: Tensor,
    payload: Tensor,
    segments: Segments,
    format: str,
    block: int,
    *,
    row: int = 0,
    factor: float = 1.0,
    unsent: Tensor | None = None,
    weight: float = 1.0,
    accumulate: bool = False,
    received: philox.RandomBits | None = None,
    random: philox.RandomBits | None = None,
) -> None:
    """Quantises the sum of the decoded payloads, as in the middle of a two-phase exchange.

    The sum does not pass through memory. Other arguments are those of ``dequantize`` and
    ``quantize``.

    Args:
        payloads: uint8, shape (ranks, bytes).
        payload: uint8, ``bytes`` entries.
        segments, row: the row of a message that all payloads are.
        unsent: float32, the entries of that row; receives ``weight`` times what was not sent.
        accumulate: adds to ``unsent`` instead.
        received: the bits that encoded ``payloads``, as ``random`` of ``dequantize``.
    """
    table = table_for("requantize", segments, format, block, payloads)
    keys = philox.key_of("requantize", received, "received"), philox.key_of("requantize", random)
    rest = (row, factor, unsent, weight, accumulate)
    requantize_op(payloads, payload, format, block, table, *rest, *keys[0], *keys[1])


def _row_numel(format: str, block: int, table: Tensor, row: int) -> int:
    check_whole("requantize", "row", row, 0, len(segments_of(table, "requantize").rows))
    return message_of(table, "requantize", format, block, row).n


@op(
    "requantize(Tensor payloads, Tensor(a!) payload, str format, int block, Tensor table,"
    " int row, float factor, Tensor(b!)? unsent, float weight, bool accumulate,"
    " Tensor? received_step, int received_seed, int received_stream, int received_first,"
    " Tensor? step, int seed, int stream, int first) -> ()",
    same=[("received_step", "step")],
    takes={
        "table": segments_of,
        "payloads": Entries(torch.uint8),
        "payload": Entries(torch.uint8),
        "unsent": Entries(torch.float32, n=_row_numel),
    },
)
def requantize_op(
    payloads: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    factor: float,
    unsent: Tensor | None,
    weight: float,
    accumulate: bool,
    received_step: Tensor | None,
    received_seed: int,
    received_stream: int,
    received_first: int,
    *key: Any,
) -> None:
    segments = segments_of(table, "requantize")
    layout = layout_for(table, "requantize", format, block)
    received = (received_step, received_seed, received_stream, received_first)
    draws = draws_of(layout, len(payloads), *received, device=payloads.device)
    total = definition.decode_row(payloads, layout, segments, row, draws) * factor
    error = torch.empty_like(total)
    # The definition rather than the op, since a definition runs no kernel in any mode.
    quantize_op.definition(total, payload, format, block, table, row, None, error, *key, 0, 1)
    if unsent is not None:
        error = (error * weight).view(unsent.shape)
        unsent.copy_(unsent + error if accumulate else error)


@requantize_op.check
def _check_requantize(
    payloads: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    received_step: Tensor | None,
    received_seed: int,
    received_stream: int,
    received_first: int,
    step: Tensor | None,
    *key: int,
) -> None:
    message = (format, block, table, row, _row_numel(format, block, table, row))
    check_messages("requantize", payloads, *message)
    check_message("requantize", payload, *message)
    received = (received_seed, received_stream, received_first)
    philox.check_key(payloads, received_step, *received)
    check_draws("requantize", format, received_step, name="received")
    philox.check_key(payloads, step, *key)
    check_draws("requantize", format, step, encoder=True)


@requantize_op.kernel("cpu")
def _requantize_cpu(
    payloads: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    factor: float,
    *rest: Any,
) -> None:
    message = message_of(table, "requantize", format, block, row)
    source = (payloads, payloads.stride(0), payloads.shape[0], factor, table, row)
    number = message.layout.format.number
    cpu.call("requantize", number, block, *source, *rest, payload, *message.places)


@requantize_op.kernel("cuda")
def _requantize_cuda(
    payloads: Tensor,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    factor: float,
    *rest: Any,
) -> None:
    layout, *_, places = message_of(table, "requantize", format, block, row)
    name = f"requantize<{layout.format.cpp}, {block}>"
    device_table = on_device(table, payloads.device)
    source = (aligned(payloads), payloads.stride(0), payloads.shape[0], factor, device_table, row)
    arguments = (*source, *rest, aligned(payload), *places)
    warps = (layout.n + layout.tails) // warp_entries(block) + 1
    cuda.launch("blockwise.cu", name, payloads.device, warps, arguments)
