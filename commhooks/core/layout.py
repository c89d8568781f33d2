"""Defines ``Layout``, the names and shapes of the parameters in a flat tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

__all__ = ["Layout"]


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
        found = []
        for begin, end in parts:
            first = bisect_right(self.offsets, begin) - 1
            last = bisect_left(self.offsets, end)
            ends = [begin, *self.offsets[first + 1 : last], end] if begin < end else [begin]
            found.append(tuple(after - before for before, after in pairwise(ends)))
        return found

    def pick(self, positions: Sequence[int]) -> Layout:
        """Returns the layout of the parameters at ``positions``, in the order given."""
        return Layout([self.names[i] for i in positions], [self.shapes[i] for i in positions])
