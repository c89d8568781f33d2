"""How PowerSGD lays out a bucket: which parameters are compressed, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks._memory import Layout

__all__ = ["Plan", "Views", "as_matrix", "compressed_rank", "payload_numel", "plan_bucket"]

# Four products a run cost 30 us in calls; to copy 2^14 entries there and back takes 10 us.
_MANY_RUNS, _SMALL = 4, 1 << 14


def payload_numel(
    shapes: Sequence[Sequence[int]], rank: int, min_compression_rate: float = 2.0
) -> int:
    """Entries that both rounds of :class:`PowerSGD` send together, for parameters of ``shapes``.

    Args:
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
    """Rows and columns of a parameter with at least two dimensions."""
    return shape[0], shape[1:].numel()


def compressed_rank(shape: torch.Size, rank: int, min_compression_rate: float) -> int:
    """The rank at which a parameter is compressed; 0 if it travels as it is."""
    if len(shape) < 2:
        return 0
    rows, columns = as_matrix(shape)
    rank = min(rank, rows, columns)
    return rank if (rows + columns) * rank * min_compression_rate < rows * columns else 0


class _Run(NamedTuple):
    """Equal pieces at a constant distance in the bucket: one strided view shows them all."""

    first: int  # position of its first piece among its equals
    pieces: int
    offset: int
    stride: int

    def view(self, flat: Tensor, *shape: int) -> Tensor:
        """All pieces of the run, shape ``(pieces, *shape)``; no copy."""
        inner = (shape[1], 1) if len(shape) == 2 else (1,)
        begin = flat.storage_offset() + self.offset
        return flat.as_strided((self.pieces, *shape), (self.stride, *inner), begin)


Views = list[tuple[slice, Tensor]]


class _Group(NamedTuple):
    """Matrices of equal shape; their factors lie side by side in the payloads."""

    rows: int
    columns: int
    rank: int
    positions: tuple[int, ...]
    runs: tuple[_Run, ...]
    scattered: bool = False  # small and at irregular offsets: computed on a stacked copy

    def views(self, flat: Tensor) -> Views:
        """For each run, which members of the group it holds, and the view of them."""
        return [
            (slice(run.first, run.first + run.pieces), run.view(flat, self.rows, self.columns))
            for run in self.runs
        ]

    def matrices(self, flat: Tensor) -> Views:
        """The matrices to compute with: ``views``, or one copy of all where that is faster."""
        views = self.views(flat)
        if not self.scattered:
            return views
        return [(slice(0, len(self.positions)), torch.cat([view for _, view in views]))]

    def put(self, matrices: Tensor, flat: Tensor) -> None:
        """Writes what ``matrices`` copied back to where it was."""
        for part, view in self.views(flat):
            view.copy_(matrices[part])


@dataclass(frozen=True, eq=False)
class Plan:
    """How a bucket is compressed: groups of matrices, and the dense tail, everything else.

    The first payload is all left factors and then the tail, the second all right factors.
    """

    groups: tuple[_Group, ...]
    tails: tuple[tuple[int, _Run], ...]  # length of the pieces, and where they are
    factors: Layout  # of the second payload; also how the warm start is remembered
    left_numel: int
    tail_numel: int

    def left(self, flat: Tensor) -> list[Tensor]:
        """The left factors (b, r, n) of each group in the first payload."""
        shapes = [(len(group.positions), group.rank, group.rows) for group in self.groups]
        return _blocks(flat, shapes)

    def right(self, flat: Tensor) -> list[Tensor]:
        """The right factors (b, r, m) of each group in the second payload."""
        shapes = [(len(group.positions), group.rank, group.columns) for group in self.groups]
        return _blocks(flat, shapes)

    def tail_views(self, flat: Tensor) -> list[Tensor]:
        """The pieces of the tail in a bucket."""
        return [run.view(flat, length) for length, run in self.tails]


def _blocks(flat: Tensor, shapes: list[tuple[int, int, int]]) -> list[Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@lru_cache(maxsize=1024)
def plan_bucket(layout: Layout, rank: int, min_compression_rate: float, batch: bool) -> Plan:
    matrices: dict[tuple[int, int, int, int], list[int]] = {}
    dense: list[tuple[int, int]] = []
    for position, shape in enumerate(layout.shapes):
        used = compressed_rank(shape, rank, min_compression_rate)
        if used:
            key = (*as_matrix(shape), used, 0 if batch else position)
            matrices.setdefault(key, []).append(position)
        elif shape.numel():
            dense.append((layout.offsets[position], layout.offsets[position + 1]))
    groups = tuple(
        _group(layout, rows, columns, used, positions)
        for (rows, columns, used, _), positions in matrices.items()
    )
    order = [(i, (group.rank, group.columns)) for group in groups for i in group.positions]
    factors = Layout([layout.names[i] for i, _ in order], [shape for _, shape in order])
    left_numel = sum(len(group.positions) * group.rank * group.rows for group in groups)
    tails, tail_numel = _tails(dense)
    return Plan(groups, tails, factors, left_numel, tail_numel)


def _group(layout: Layout, rows: int, columns: int, rank: int, positions: list[int]) -> _Group:
    runs = _runs([layout.offsets[i] for i in positions])
    scattered = len(runs) >= _MANY_RUNS and rows * columns <= _SMALL
    return _Group(rows, columns, rank, tuple(positions), runs, scattered)


def _tails(spans: list[tuple[int, int]]) -> tuple[tuple[tuple[int, _Run], ...], int]:
    """The spans of the tail, neighbours joined, as runs; and their entries."""
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
        runs.append(_Run(first, end - first, offsets[first], stride))
        first = end
    return tuple(runs)
