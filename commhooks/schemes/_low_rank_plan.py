"""Plans how low-rank schemes split a bucket: compressed matrices, and the dense tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.kernels import Matrices, tail_table

__all__ = ["Plan", "as_matrix", "compressed_rank", "payload_numel", "plan_bucket"]

Tail = TypeVar("Tail", Tensor, Tensor | None)


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


@dataclass(frozen=True, eq=False)
class Plan:
    """Describes how a bucket is compressed: its matrices, and the tail, which is all other entries.

    The first payload of PowerSGD is all left factors, the second all right factors and then the
    tail.

    Attributes:
        matrices: begin, rows, columns and rank of each compressed matrix, for kernels.
        tail: table of the pieces of the tail, for kernels.
        factors: layout of the right factors, in the second payload and in memory.
        tail_numel: number of entries of the tail.
    """

    matrices: Matrices
    tail: Tensor
    factors: Layout
    tail_numel: int

    def with_tail(self, tail: Tail) -> tuple[Tensor, Tail] | None:
        """Returns the table of the tail and ``tail``, as kernels take them; None without a tail."""
        return (self.tail, tail) if self.tail_numel else None

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
    tail = tail_table(_joined(dense))
    return Plan(Matrices(compressed), tail, factors, int(tail[-1, 1]))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns spans with adjacent spans merged."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined
