"""How PowerSGD lays out a bucket: which parameters are compressed, and where they lie."""

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

    pieces: int
    offset: int
    stride: int

    def view(self, flat: Tensor, length: int) -> Tensor:
        """All pieces of the run, shape ``(pieces, length)``; no copy."""
        begin = flat.storage_offset() + self.offset
        return flat.as_strided((self.pieces, length), (self.stride, 1), begin)


@dataclass(frozen=True, eq=False)
class Plan:
    """How a bucket is compressed: its matrices, and the dense tail, everything else.

    The first payload is all left factors and then the tail, the second all right factors.
    """

    matrices: Matrices
    tails: tuple[tuple[int, _Run], ...]  # length of the pieces, and where they are
    factors: Layout  # of the second payload; also how the warm start is remembered
    tail_numel: int

    def tail_views(self, flat: Tensor) -> list[Tensor]:
        """The pieces of the tail in a bucket."""
        return [run.view(flat, length) for length, run in self.tails]

    def take_tail(self, grad: Tensor, residual: Tensor | None, total: Tensor, tail: Tensor) -> None:
        """Writes the tail of ``grad + residual`` to ``tail``, and to its places in ``total``."""
        if not self.tails:
            return
        torch.cat([view.reshape(-1) for view in self.tail_views(grad)], out=tail)
        if residual is not None:
            tail += torch.cat([view.reshape(-1) for view in self.tail_views(residual)])
        if total is not grad or residual is not None:
            self.write_tail(tail, total)

    def write_tail(self, tail: Tensor, flat: Tensor) -> None:
        """Writes a tail to its places in a bucket."""
        for view, piece in _pieces(self.tail_views(flat), tail):
            view.copy_(piece)

    def keep_tail(self, total: Tensor, sent: Tensor | None, unsent: Tensor) -> None:
        """Writes what was not sent of the tail of ``total``, nothing by default, to ``unsent``."""
        rest = self.tail_views(unsent)
        if sent is None:
            for view in rest:
                view.zero_()
        else:
            whole = self.tail_views(total)
            for view, (tail, piece) in zip(rest, _pieces(whole, sent), strict=True):
                torch.sub(tail, piece, out=view)

    @cached_property
    def left_factors(self) -> Layout:
        """Of all left factors; the right ones are ``factors``."""
        rows = self.matrices.table[:-1, 1].tolist()
        shapes = [(shape[0], n) for shape, n in zip(self.factors.shapes, rows, strict=True)]
        return Layout(self.factors.names, shapes)

    @cached_property
    def right_as_left(self) -> Matrices:
        """Matrices whose left factors are the right ones of these: to work on them alike."""
        begins = accumulate((columns for _, columns in self.factors.shapes), initial=0)
        shapes = zip(begins, self.factors.shapes, strict=False)
        return Matrices([(begin, columns, 1, rank) for begin, (rank, columns) in shapes])


@lru_cache(maxsize=1024)
def plan_bucket(layout: Layout, rank: int, min_compression_rate: float) -> Plan:
    places: list[tuple[int, int, int, int]] = []
    names: list[str] = []
    dense: list[tuple[int, int]] = []
    for name, shape, begin in zip(layout.names, layout.shapes, layout.offsets, strict=False):
        used = compressed_rank(shape, rank, min_compression_rate)
        if used:
            places.append((begin, *as_matrix(shape), used))
            names.append(name)
        elif shape.numel():
            dense.append((begin, begin + shape.numel()))
    factors = Layout(names, [(used, columns) for _, _, columns, used in places])
    tails, tail_numel = _tails(dense)
    return Plan(Matrices(places), tails, factors, tail_numel)


def _pieces(views: list[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each view with its part of a flat tensor."""
    parts = flat.split([view.numel() for view in views]) if views else ()
    for view, part in zip(views, parts, strict=True):
        yield view, part.view(view.shape)


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
        runs.append(_Run(end - first, offsets[first], stride))
        first = end
    return tuple(runs)
