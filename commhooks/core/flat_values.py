"""Stores tensors by key and parameter name, flat for the layouts in use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from ddp_core import borrow_memory

__all__ = ["FlatValues", "Initial", "Place"]

Place = tuple[str, Layout]
Initial = Callable[[str, torch.Size], Tensor | None]


class FlatValues:
    """Stores the values of parameters in one flat tensor per key and layout, or one by one.

    A value is in the newest layout that its parameter was put with. Values of an older layout's
    other parameters become *loose*, separate tensors, as are values that were loaded.

    Args:
        loose: values by key, then parameter name.

    Attributes:
        flat: the tensors in use, by key and layout; :meth:`put` replaces them.
        spare: tensors of earlier steps that are not read any more and may be overwritten.
        reused: keys that have spare tensors, since somebody asks for them.
    """

    def __init__(self, loose: Mapping[str, Mapping[str, Tensor]] | None = None) -> None:
        self.flat: dict[Place, Tensor] = {}
        self.spare: dict[Place, Tensor] = {}
        self.reused: set[str] = set()
        self._where: dict[str, dict[str, tuple[Layout, int]]] = {}
        self._loose = {key: dict(names) for key, names in (loose or {}).items()}

    def has(self, key: str) -> bool:
        """Whether any parameter has a value of ``key``."""
        return bool(self._where.get(key)) or bool(self._loose.get(key))

    def get(self, key: str, name: str) -> Tensor | None:
        """Returns the value of one parameter, or None; it may be a view of a flat tensor."""
        place = self._where.get(key, {}).get(name)
        if place is None:
            return self._loose.get(key, {}).get(name)
        layout, index = place
        begin = layout.offsets[index]
        flat = self.flat[key, layout]
        return flat[begin : begin + layout.sizes[index]].view(layout.shapes[index])

    def items(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields all values as (key, parameter name, tensor), sorted."""
        # Sorted: the order in which buckets came does not show in what is saved.
        for key in sorted({*self._where, *self._loose}):
            names = {**self._loose.get(key, {}), **self._where.get(key, {})}
            for name in sorted(names):
                value = self.get(key, name)
                assert value is not None
                yield key, name, value

    def collect(self, key: str, layout: Layout, flat: Tensor, initial: Initial | None) -> None:
        """Copies the values of a layout's parameters to a flat tensor.

        Args:
            initial: returns the value of a parameter that has none of its shape; None: it stays.
        """
        for name, view in zip(layout.names, layout.views(flat), strict=True):
            old = self.get(key, name)
            if old is not None:
                borrow_memory(old)
            # A value of another shape is of other settings; ``initial`` may still use it.
            if old is not None and old.shape == view.shape:
                view.copy_(old)
            elif initial is not None and (first := initial(name, view.shape)) is not None:
                view.copy_(first)

    def put(self, key: str, layout: Layout, flat: Tensor) -> None:
        """Replaces the values of a layout's parameters."""
        if (key, layout) in self.flat:
            self.flat[key, layout] = flat
            return
        where = self._where.setdefault(key, {})
        # Older layouts that share a parameter are dissolved. A clone of each other value, since a
        # view would keep the whole old tensor alive.
        old_layouts = {where[name][0] for name in layout.names if name in where}
        loose = self._loose.setdefault(key, {})
        for old in old_layouts:
            for name in old.names:
                value = self.get(key, name)
                if value is not None and name not in layout.names:
                    borrow_memory(value)
                    loose[name] = value.clone()
                where.pop(name, None)
            self._free(key, old)
        for index, name in enumerate(layout.names):
            where[name] = (layout, index)
            loose.pop(name, None)
        self.flat[key, layout] = flat

    def forget(self, key: str, layout: Layout, names: Collection[str]) -> None:
        """Removes the values of some of a layout's parameters; the others become loose."""
        # A flat tensor has a value for every parameter of its layout, so it cannot stay.
        for name in layout.names:
            value = self.get(key, name)
            if value is not None and name not in names:
                borrow_memory(value)
                self._loose[key][name] = value.clone()
            self._where[key].pop(name)
        self._free(key, layout)

    def remove(self, key: str, layout: Layout) -> None:
        """Removes the values of all of a layout's parameters."""
        self._free(key, layout)
        for name in layout.names:
            self._where.get(key, {}).pop(name, None)
            self._loose.get(key, {}).pop(name, None)

    def drop(self, key: str) -> None:
        """Removes every value of ``key``."""
        for _, layout in [place for place in (*self.flat, *self.spare) if place[0] == key]:
            self._free(key, layout)
        self._where.pop(key, None)
        self._loose.pop(key, None)

    def nbytes(self) -> int:
        """Returns the number of bytes held, spare tensors included."""
        loose = [value for values in self._loose.values() for value in values.values()]
        tensors = [*self.flat.values(), *self.spare.values(), *loose]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _free(self, key: str, layout: Layout) -> None:
        self.flat.pop((key, layout), None)
        self.spare.pop((key, layout), None)
