"""Checks the arguments that ops on blockwise payloads share."""

from __future__ import annotations

import torch
from torch import Tensor

from . import philox
from ._blockwise_formats import Payload, layout_of
from .runtime.arguments import check_whole
from .runtime.op import check

__all__ = ["check_feedback", "check_message", "check_messages", "rows_in"]


def rows_in(payload: Tensor) -> int:
    """Returns the number of payloads of a message: one, if it is no matrix."""
    return payload.shape[-2] if payload.dim() > 1 else 1


def check_message(
    caller: str,
    payload: Tensor,
    format: str,
    block: int,
    shard: int,
    n: int,
    like: Tensor,
    *,
    most: int = 2,
) -> None:
    """Raises unless ``payload`` has the dtype and the size of a message of ``n`` entries.

    Args:
        most: the largest number of dimensions.
    """
    check(caller, "payload", payload, like=like, dtypes=(torch.uint8,))
    if not 1 <= payload.dim() <= most:
        shapes = "(bytes,)" + " or (rows, bytes)" * (most > 1)
        raise ValueError(f"{caller}(payload): shape {shapes}, got {tuple(payload.shape)}")
    rows = rows_in(payload)
    layout = _layout_of_rows(caller, "payload", format, block, shard, n, rows)
    if payload.shape[-1] != layout.bytes:
        _refuse_size(caller, "payload", layout, payload.shape[-1])


def check_messages(
    caller: str,
    payloads: Tensor,
    format: str,
    block: int,
    shard: int,
    n: int,
    *,
    most: int = 3,
) -> None:
    """Raises unless ``payloads`` holds messages of ``n`` entries, one or more."""
    check(caller, "payloads", payloads, like=payloads, dtypes=(torch.uint8,))
    if not 2 <= payloads.dim() <= most or not len(payloads):
        shapes = "(1 or more, bytes)" + " or (1 or more, rows, bytes)" * (most > 2)
        raise ValueError(f"{caller}(payloads): shape {shapes}, got {tuple(payloads.shape)}")
    rows = payloads.shape[1] if payloads.dim() == 3 else 1
    layout = _layout_of_rows(caller, "payloads", format, block, shard, n, rows)
    if payloads.shape[-1] != layout.bytes:
        _refuse_size(caller, "payloads", layout, payloads.shape[-1])


def _layout_of_rows(
    caller: str, name: str, format: str, block: int, shard: int, n: int, rows: int
) -> Payload:
    """Returns the layout of a full row, of which ``rows`` hold ``n`` entries."""
    layout = layout_of(caller, format, block, shard)
    check_whole(caller, "shard", shard, 0, philox.ROW if rows > 1 else 2**56)
    check_whole(caller, f"{name}, rows", rows, 1, 2**16)  # a grid's second dimension
    if n > shard and shard % block:  # else the rows behind the first are empty
        raise ValueError(f"{caller}(shard): a multiple of the block, {block}, got {shard}")
    if rows * shard < n:
        raise ValueError(
            f"{caller}({name}): {rows} rows of {shard} entries, which are too few for {n}"
        )
    return layout


def _refuse_size(caller: str, name: str, layout: Payload, got: int) -> None:
    raise ValueError(
        f"{caller}({name}): {layout.bytes} bytes for {layout.n} entries, got {got}; "
        "see payload_bytes"
    )


def check_feedback(
    caller: str, like: Tensor, n: int, residual: Tensor | None, unsent: Tensor | None
) -> None:
    """Raises unless ``residual`` and ``unsent``, where given, are float32 of ``n`` entries."""
    if residual is not None:
        check(caller, "residual", residual, like=like, dtypes=(torch.float32,), n=n)
    if unsent is not None and unsent is not residual:  # feedback in place is the common case
        check(caller, "unsent", unsent, like=like, dtypes=(torch.float32,), n=n)
