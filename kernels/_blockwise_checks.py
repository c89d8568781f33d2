"""Checks the arguments that ops on blockwise payloads share."""

from __future__ import annotations

import torch
from torch import Tensor

from ._blockwise_formats import FORMATS, Payload, layout_of
from .runtime.arguments import check_whole
from .runtime.op import check
from .segments import segments_of

__all__ = ["check_draws", "check_feedback", "check_message", "check_messages"]


def check_message(
    caller: str,
    payload: Tensor,
    format: str,
    block: int,
    table: Tensor,
    row: int,
    n: int,
    like: Tensor,
) -> None:
    """Raises unless ``payload`` is a message of ``n`` entries, or the row of one."""
    layout, rows = _layout_of_rows(caller, format, block, table, row, n)
    check(caller, "payload", payload, like=like, dtypes=(torch.uint8,))
    shape = tuple(payload.shape)
    if shape != (rows, layout.bytes) and (rows > 1 or shape != (layout.bytes,)):
        _refuse_size(caller, "payload", "", rows, layout, shape)


def check_messages(
    caller: str, payloads: Tensor, format: str, block: int, table: Tensor, row: int, n: int
) -> None:
    """Raises unless ``payloads`` holds messages of ``n`` entries, one or more."""
    layout, rows = _layout_of_rows(caller, format, block, table, row, n)
    check(caller, "payloads", payloads, like=payloads, dtypes=(torch.uint8,))
    shape = tuple(payloads.shape)
    inner = shape[1:]
    if (
        not shape
        or not shape[0]
        or (inner != (rows, layout.bytes) and (rows > 1 or inner != (layout.bytes,)))
    ):
        _refuse_size(caller, "payloads", "1 or more, ", rows, layout, shape)


def _layout_of_rows(
    caller: str, format: str, block: int, table: Tensor, row: int, n: int
) -> tuple[Payload, int]:
    """Returns the layout of a row, and the number of rows that are worked on."""
    segments = segments_of(caller, table)
    layout = layout_of(caller, format, block, segments.slots, segments.tails)
    if segments.granule % block:
        raise ValueError(
            f"{caller}(segments): made for blocks that divide {segments.granule}, got {block}"
        )
    rows = len(segments.rows)
    check_whole(caller, "row", row, -1, rows)
    check_whole(caller, "rows of segments", rows, 1, 2**16)  # a grid's second dimension
    begin, end = segments.row(row)
    if end - begin != n:
        raise ValueError(f"{caller}(segments): of {end - begin} entries, got {n}")
    return layout, rows if row < 0 else 1


def _refuse_size(
    caller: str, name: str, before: str, rows: int, layout: Payload, shape: tuple[int, ...]
) -> None:
    raise ValueError(
        f"{caller}({name}): shape ({before}{rows}, {layout.bytes}), "
        f"{layout.bytes} bytes a row, got {shape}; see payload_bytes"
    )


def check_draws(
    caller: str, format: str, step: Tensor | None, *, encoder: bool = False, name: str = "random"
) -> None:
    """Raises unless a decoder has draws for a dithered format, and for no other.

    Args:
        encoder: other formats may have draws, too.
    """
    dithered = FORMATS[format].dithered
    if dithered and step is None:
        raise ValueError(f"{caller}({name}): {format} needs the bits of a dither, got None")
    if not dithered and step is not None and not encoder:
        raise ValueError(f"{caller}({name}): has to be None, as {format} is not dithered")


def check_feedback(
    caller: str, like: Tensor, n: int, residual: Tensor | None, unsent: Tensor | None
) -> None:
    """Raises unless ``residual`` and ``unsent``, where given, are float32 of ``n`` entries."""
    if residual is not None:
        check(caller, "residual", residual, like=like, dtypes=(torch.float32,), n=n)
    if unsent is not None and unsent is not residual:  # feedback in place is the common case
        check(caller, "unsent", unsent, like=like, dtypes=(torch.float32,), n=n)
