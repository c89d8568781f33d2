"""Plans how low-rank schemes split a bucket: compressed matrices, and the dense tail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from commhooks.kernels import Matrices

__all__ = ["Plan", "as_matrix", "compressed_rank", "payload_numel", "plan_bucket"]


def payload_numel(
    shapes: Sequence[Sequence[int]], rank: int, min_compression_rate: float = 2.0
) -> int:
    """Returns the number of entries that both rounds of :class:`PowerSGD` send together.

    Args:
        shapes: of all parameters.
        rank: of the factors.
        min_compression_rate: 0 gives the numbers of the paper, 2 those of torch's hook.

    Example:
        >>> payload_numel([(512, 256, 3, 3), (512,)], rank=4)
        11776
    """
    total = 0
    for shape in map(torch.Size, shapes):
        used = compressed_rank(shape, rank, min_compression_rate)
        total += used * sum(as_matrix(shape)) if used else shape.numel()
    return total


def as_matrix(shape: torch.Size) -> tuple[int, int]:
    """Returns rows and columns of a parameter with at least two dimensions."""
    return shape[0], shape[1:].numel()


def compressed_rank(shape: torch.Size, rank: int, min_compression_rate: float) -> int:
    """Returns the rank at which a parameter is compressed; 0 if it is not compressed."""
    if len(shape) < 2:
        return 0
    rows, columns = as_matrix(shape)
    rank = min(rank, rows, columns)
    return rank if (rows + columns) * rank * min_compression_rate < rows * columns else 0


class _Run(NamedTuple):
    """Describes pieces of equal length at a constant distance in the bucket: one strided view."""

    pieces: int
    offset: int
    stride: int

    def view(self, flat: Tensor, length: int) -> Tensor:
        """Returns all pieces of the run as a view of shape ``(pieces, length)``."""
        begin = flat.storage_offset() + self.offset
        return flat.as_strided((self.pieces, length), (self.stride, 1), begin)


@dataclass(frozen=True, eq=False)
class Plan:
    """Describes how a bucket is compressed: its matrices, and the tail, which is all other entries.

    The first payload of PowerSGD is all left factors and then the tail, the second all right
    factors.

    Attributes:
        matrices: begin, rows, columns and rank of each compressed matrix, for kernels.
        tails: the entries of the tail, as pairs of length and run of pieces.
        factors: layout of the right factors, in the second payload and in memory.
        tail_numel: number of entries of the tail.
    """

    matrices: Matrices
    # As runs: in a model of equal layers, biases are at equal distances, and a few strided views
    # replace one call per parameter.
    tails: tuple[tuple[int, _Run], ...]
    factors: Layout
    tail_numel: int

    def tail_views(self, flat: Tensor) -> list[Tensor]:
        """Returns views of the pieces of the tail in a bucket."""
        return [run.view(flat, length) for length, run in self.tails]

    def take_tail(self, grad: Tensor, residual: Tensor | None, total: Tensor, tail: Tensor) -> None:
        """Writes the tail of ``grad + residual`` to ``tail``, and to the bucket ``total``."""
        if not self.tails:
            return
        torch.cat([view.reshape(-1) for view in self.tail_views(grad)], out=tail)
        if residual is not None:
            tail += torch.cat([view.reshape(-1) for view in self.tail_views(residual)])
        if total is not grad or residual is not None:
            self.write_tail(tail, total)

    def write_tail(self, tail: Tensor, flat: Tensor) -> None:
        """Writes a tail to the bucket ``flat``."""
        for view, piece in _pieces(self.tail_views(flat), tail):
            view.copy_(piece)

    def keep_tail(self, total: Tensor, sent: Tensor | None, unsent: Tensor) -> None:
        """Writes the tail of ``total`` minus ``sent`` to ``unsent``; None: all of it was sent."""
        views = self.tail_views(unsent)
        if sent is None:
            for view in views:
                view.zero_()
        else:
            totals = self.tail_views(total)
            for view, (tail, piece) in zip(views, _pieces(totals, sent), strict=True):
                torch.sub(tail, piece, out=view)

    @cached_property
    def right_as_left(self) -> Matrices:
        """Returns matrices whose left factors are the right factors of these.

        Kernels for left factors then work on right factors, too.
        """
        begins = accumulate((columns for _, columns in self.factors.shapes), initial=0)
        shapes = zip(begins, self.factors.shapes, strict=False)
        return Matrices([(begin, columns, 1, rank) for begin, (rank, columns) in shapes])


@lru_cache(maxsize=1024)
def plan_bucket(layout: Layout, rank: int, min_compression_rate: float) -> Plan:
    """Returns the plan of a bucket, computed once per layout and settings."""
    compressed: list[tuple[int, int, int, int]] = []
    names: list[str] = []
    dense: list[tuple[int, int]] = []
    for name, shape, begin in zip(layout.names, layout.shapes, layout.offsets, strict=False):
        used = compressed_rank(shape, rank, min_compression_rate)
        if used:
            compressed.append((begin, *as_matrix(shape), used))
            names.append(name)
        elif shape.numel():
            dense.append((begin, begin + shape.numel()))
    factors = Layout(names, [(used, columns) for _, _, columns, used in compressed])
    tails, tail_numel = _tails(dense)
    return Plan(Matrices(compressed), tails, factors, tail_numel)


def _pieces(views: list[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each view with its part of a flat tensor."""
    parts = flat.split([view.numel() for view in views]) if views else ()
    for view, part in zip(views, parts, strict=True):
        yield view, part.view(view.shape)


def _tails(spans: list[tuple[int, int]]) -> tuple[tuple[tuple[int, _Run], ...], int]:
    """Returns the spans of the tail as runs, adjacent ones joined, and their number of entries."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    by_length: dict[int, list[int]] = {}
    for begin, end in joined:
        by_length.setdefault(end - begin, []).append(begin)
    tails = [(length, run) for length, begins in by_length.items() for run in _runs(begins)]
    return tuple(tails), sum(end - begin for begin, end in joined)


def _runs(offsets: list[int]) -> tuple[_Run, ...]:
    """Splits increasing offsets into stretches of constant distance, from the left."""
    runs: list[_Run] = []
    first = 0
    while first < len(offsets):
        end = first + 1
        stride = offsets[end] - offsets[first] if end < len(offsets) else 0
        while end < len(offsets) and offsets[end] - offsets[end - 1] == stride:
            end += 1
        runs.append(_Run(end - first, offsets[first], stride))
        first = end
    return tuple(runs)
