"""Defines ``Layout``, the parameters in a flat tensor, and cuts a flat tensor into shards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

__all__ = ["Layout", "Span", "check_shards", "equal_shards", "from_rows", "to_rows"]


class Layout:
    """Describes which parameters a flat tensor holds, in order.

    Args:
        names: parameter names.
        shapes: the shape of each parameter in the flat tensor.
    """

    __slots__ = ("_hash", "_scalars", "names", "numel", "offsets", "shapes", "sizes")

    def __init__(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        self.names = tuple(names)
        self.shapes = tuple(torch.Size(shape) for shape in shapes)
        self.sizes = tuple(shape.numel() for shape in self.shapes)
        self.offsets = (0, *accumulate(self.sizes))
        self.numel = self.offsets[-1]
        # Layouts are keys of memory and of cached plans, looked up several times per bucket and
        # step: names and shapes are hashed once, and derived layouts are kept.
        self._hash = hash((self.names, self.shapes))
        self._scalars: Layout | None = None

    @property
    def scalars(self) -> Layout:
        """Returns the layout of one number per parameter."""
        if self._scalars is None:
            self._scalars = Layout(self.names, [()] * len(self))
        return self._scalars

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.names, self.shapes) == (
            other.names,
            other.shapes,
        )

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Layout({len(self)} parameters, {self.numel} entries)"

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns views into ``flat``, one per parameter, in the shape of the parameter."""
        parts = flat.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def cut(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Returns for each part of the flat tensor how many entries of each parameter are in it.

        Args:
            parts: begin and end of each part.
        """
        lengths = []
        for begin, end in parts:
            first = bisect_right(self.offsets, begin) - 1
            last = bisect_left(self.offsets, end)
            ends = [begin, *self.offsets[first + 1 : last], end] if begin < end else [begin]
            lengths.append(tuple(after - before for before, after in pairwise(ends)))
        return lengths

    def pick(self, positions: Sequence[int]) -> Layout:
        """Returns the layout of the parameters at ``positions``, in the order given."""
        return Layout([self.names[i] for i in positions], [self.shapes[i] for i in positions])


# ---- shards


Span = tuple[int, int]


def equal_shards(n: int, count: int) -> tuple[Span, ...]:
    """Returns begin and end of ``count`` shards of ``n`` entries, a multiple of ``count``."""
    length = n // count
    return tuple((i * length, (i + 1) * length) for i in range(count))


def check_shards(shards: Sequence[Span], n: int, world_size: int) -> Sequence[Span]:
    """Returns the shards; raises ValueError unless they cover ``n`` entries, the first the longest.

    Args:
        shards: begin and end of the shard of each rank.
        n: number of entries of the flat tensor.
        world_size: number of ranks.
    """
    ends = [0, *(end for _, end in shards)]
    in_order = all(begin == before for (begin, _), before in zip(shards, ends, strict=False))
    lengths = [end - begin for begin, end in shards]
    if (
        len(shards) != world_size
        or not in_order
        or ends[-1] != n
        or min(lengths) < 0
        or max(lengths) > lengths[0]
    ):
        raise ValueError(
            f"shards=...: begin and end of one shard for each of {world_size} ranks, one after "
            f"the other over all {n} entries, the first being the longest; got {list(shards)[:8]}"
        )
    return shards


def to_rows(flat: Tensor, shards: Sequence[Span]) -> Tensor:
    """Returns shards as rows of equal length, filled up with zeros; a view where all are equal."""
    length = shards[0][1]
    if len(shards) * length == flat.numel():
        return flat.view(len(shards), length)
    rows = flat.new_zeros(len(shards), length)
    for row, (begin, end) in zip(rows, shards, strict=True):
        row[: end - begin] = flat[begin:end]
    return rows


def from_rows(rows: Tensor, shards: Sequence[Span]) -> Tensor:
    """Returns the flat tensor whose shards are rows; the inverse of :func:`to_rows`."""
    n = shards[-1][1]
    if rows.numel() == n:
        return rows.reshape(-1)
    flat = rows.new_empty(n)
    for row, (begin, end) in zip(rows, shards, strict=True):
        flat[begin:end] = row[: end - begin]
    return flat
