"""Describes the entries of a bucket that no matrix has: the tail of a low-rank payload.

A table lists the pieces of the tail: an int64 row per piece with its begin in the bucket and its
place in the tail, and a last row with the end of the bucket's last piece and the tail's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ._tables import once_per_table

__all__ = ["gather", "on_device", "scatter", "subtract", "tail_of", "tail_table"]


def tail_table(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Returns the table of pieces with these begins and ends, in increasing order.

    Raises:
        ValueError: a piece ends before it begins, or overlaps the one before.

    Example:
        >>> tail_table([(0, 3), (10, 12)]).tolist()
        [[0, 0], [10, 3], [12, 5]]
    """
    rows, place, last = [], 0, 0
    for begin, end in spans:
        if not last <= begin <= end:
            raise ValueError(f"tail_table(spans): increasing, without overlap, got {spans}")
        rows.append((begin, place))
        place, last = place + end - begin, end
    return torch.tensor([*rows, (last, place)], dtype=torch.int64, device="cpu")


def gather(
    x: Tensor, residual: Tensor | None, total: Tensor | None, table: Tensor, tail: Tensor
) -> None:
    """Writes the pieces of ``x + residual`` one after the other to ``tail``, and to ``total``."""
    for here, there in _pieces(table):
        values = x[here].to(tail.dtype)
        if residual is not None:
            values = values + residual[here]
        tail[there] = values
        if total is not None:
            total[here] = values


def scatter(tail: Tensor, table: Tensor, out: Tensor) -> None:
    """Writes ``tail`` to the pieces of ``out``."""
    for here, there in _pieces(table):
        out[here] = tail[there]


def subtract(total: Tensor, table: Tensor, sent: Tensor | None, unsent: Tensor) -> None:
    """Writes ``total - sent`` to the pieces of ``unsent``; None: all was sent."""
    for here, there in _pieces(table):
        unsent[here] = 0.0 if sent is None else total[here] - sent[there]


class Tail(NamedTuple):
    """Describes a table of pieces.

    Attributes:
        pieces: the places of each in the bucket and in the tail.
        end: the end of the last piece in the bucket.
        length: the number of entries of all pieces.
    """

    pieces: tuple[tuple[slice, slice], ...]
    end: int
    length: int


@once_per_table
def tail_of(table: Tensor, caller: str) -> Tail:
    """Returns the pieces of a table; raises ValueError unless ``tail_table`` can make it."""
    good = table.is_cpu and table.dtype == torch.int64
    tail = _read(table) if good else None
    if tail is None:
        raise ValueError(
            f"{caller}(tails): a table as tail_table makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return tail


def _read(table: Tensor) -> Tail | None:
    if table.dim() != 2 or not len(table) or table.shape[1] != 2 or not table.is_contiguous():
        return None
    rows = table.tolist()
    lengths = [after[1] - row[1] for row, after in pairwise(rows)]
    spans = [(row[0], row[0] + length) for row, length in zip(rows, lengths, strict=False)]
    try:
        same = torch.equal(tail_table(spans), table)
    except ValueError:
        return None
    if not same:
        return None
    pieces = tuple(
        (slice(begin, end), slice(row[1], row[1] + end - begin))
        for (begin, end), row in zip(spans, rows, strict=False)
    )
    return Tail(pieces, *rows[-1])


def _pieces(table: Tensor) -> tuple[tuple[slice, slice], ...]:
    return tail_of(table, "tail").pieces


def on_device(table: Tensor | None, device: torch.device) -> tuple[Tensor | None, int, int]:
    """Returns the table on ``device``, copied once, and the numbers of pieces and of entries."""
    return (None, 0, 0) if table is None else _copied(table, device)


@once_per_table
def _copied(table: Tensor, device: torch.device) -> tuple[Tensor, int, int]:
    return table.to(device), len(table) - 1, int(table[-1, 1])
