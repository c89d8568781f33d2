"""Keeps a scheme's tensors between steps, by parameter name.

A scheme works on flat tensors, one per bucket, but buckets change (DDP rebuilds them, a resumed job
starts with others). So values are kept flat for the layout in use, and are found by parameter name
when the layout changes.

Writes of a step are staged. They take effect if every bucket of the step arrived finite, and are
dropped otherwise, so an overflow leaves residuals and factors as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.kernels import restore
from ddp_core import StreamOrder, record_stream

__all__ = ["FlatValues", "Initial", "Memory", "Place", "share_storage", "staged_in"]


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
                record_stream(old)
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
                    record_stream(value)
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
                record_stream(value)
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


# ---- memory


class Memory:
    """Holds tensors by key ("residual", "powersgd.q") and parameter name."""

    def __init__(self) -> None:
        self._committed = FlatValues()
        self._staged: dict[Place, Tensor | None] = {}
        self._notes: dict[Place, Tensor] = {}
        # Of one old tensor, values go to several buckets, exchanged on several streams.
        self._moves = StreamOrder()
        # Keys of the slots of the scheme that runs, which ``Bucket.write`` accepts. None: any key.
        self.declared: frozenset[str] | None = None

    # ---- used by schemes

    def read(
        self,
        key: str,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        initial: Initial | None = None,
    ) -> Tensor:
        """Returns the committed values of ``key`` for ``layout``, flat; not to be written to.

        Args:
            key: key of the values.
            layout: parameters and shapes, in order.
            device: device of the result.
            dtype: dtype of values that are made here.
            initial: returns the value of a parameter that has none of this shape; None: zeros.
        """
        flat = self._committed.flat.get((key, layout))
        if flat is not None and flat.device == device:
            return flat
        with self._moves.turn(device):
            flat = torch.zeros(layout.numel, device=device, dtype=dtype)
            self._committed.collect(key, layout, flat, initial)
            # Kept, although this is no commit: the values are the same, in the layout in use.
            self._committed.put(key, layout, flat)
        return flat

    def has(self, key: str) -> bool:
        """Whether any parameter has a committed value of ``key``."""
        return self._committed.has(key)

    def get(self, key: str, name: str) -> Tensor | None:
        """Returns the committed value of one parameter, or None."""
        return self._committed.get(key, name)

    def scratch(self, key: str, layout: Layout, like: Tensor) -> Tensor:
        """Returns a flat tensor to fill and then ``write``: the one that the last commit freed.

        A new one if that does not fit.
        """
        # New pages cost the CPU more than the addition that fills them.
        self._committed.reused.add(key)
        spare = self._committed.spare.pop((key, layout), None)
        if spare is not None and spare.device == like.device and spare.dtype == like.dtype:
            return spare
        return torch.empty_like(like)

    def write(self, key: str, layout: Layout, flat: Tensor | None) -> None:
        """Stages the new values of ``key`` for ``layout``; None removes them."""
        self._staged[key, layout] = flat

    def note(self, key: str, layout: Layout, values: Tensor) -> None:
        """Stages numbers on the host, which are read without waiting for a GPU.

        On a GPU they are committed even if the step was bad, since the host does not wait for the
        verdict.
        """
        self._notes[key, layout] = values

    # ---- used by the engine

    def for_step(self) -> Memory:
        """Returns a memory with the same values and a separate staging area.

        An exchange of an aborted step that is still running cannot write into the next step.
        """
        step = object.__new__(type(self))
        step.__dict__.update(self.__dict__, _staged={}, _notes={})  # committed values are shared
        return step

    def writes_on(self, device: torch.device) -> Memory:
        """Returns a memory with the same values and, of the staged writes, those on ``device``."""
        part = self.for_step()
        part._notes = self._notes
        for place, flat in self._staged.items():
            held = self._committed.flat.get(place) if flat is None else flat
            if held is None or held.device == device:
                part._staged[place] = flat
        return part

    def commit(self, good: Tensor, unused: Collection[str] = ()) -> None:
        """Ends a step: commits the staged writes if ``good`` (one bool), else drops them.

        On a GPU the choice is made on the device, without waiting for it.

        Args:
            good: the verdict, a tensor of one bool.
            unused: parameters that did not take part in the step; their values stay.
        """
        # Take what was staged, with the old values of parameters that did not take part.
        staged, self._staged = self._staged, {}
        notes, self._notes = self._notes, {}
        absent: dict[Place, list[str]] = {}
        # Parameters that had no value have none afterwards. Zeros would count as a value, from
        # which ACP-SGD and ``IntSGD`` do not recover (docs/design/foundation.md).
        if unused:
            absent = {
                (key, layout): [
                    name
                    for name in layout.names
                    if name in unused and self._committed.get(key, name) is None
                ]
                for key, layout in staged
            }
            staged = {
                (key, layout): self._without(key, layout, flat, unused)
                for (key, layout), flat in staged.items()
            }

        # On the host the verdict decides here; on a GPU a kernel chooses between old and new.
        on_host = good.device.type == "cpu"
        if on_host and not good.item():
            _spare(self._committed, staged)
            return
        for (key, layout), values in notes.items():
            self._committed.put(key, layout, values)
        changes: list[tuple[Place, Tensor | None, Tensor | None]] = []
        replaced: list[tuple[Tensor, Tensor]] = []
        for (key, layout), flat in staged.items():
            # The device chooses later, so the old values have to be in this layout now.
            if not on_host and flat is not None:
                self.read(key, layout, device=flat.device, dtype=flat.dtype)
            old = self._committed.flat.get((key, layout))
            if not on_host and old is not None:
                flat = torch.zeros_like(old) if flat is None else flat  # None: a removal
                if not share_storage(flat, old):  # else a scheme wrote what it had read
                    replaced.append((flat, old.to(flat.dtype)))
            changes.append(((key, layout), flat, old))
        # The new tensors are kept, and a kernel writes the old values to them if the step was bad:
        # after a good one, as nearly all are, nothing passes through memory.
        restore(replaced, good)

        # Keep the new values, and the old tensors for the next step.
        for (key, layout), flat, old in changes:
            if flat is None:
                self._committed.remove(key, layout)
                continue
            self._committed.put(key, layout, flat)
            fits = old is not None and old.shape == flat.shape and not share_storage(flat, old)
            # On a GPU the caching allocator reuses what is freed.
            if on_host and key in self._committed.reused and old is not None and fits:
                self._committed.spare[key, layout] = old
            if new := absent.get((key, layout)):
                self._committed.forget(key, layout, new)

    # ---- saving and loading

    def items(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields all committed values as (key, parameter name, tensor)."""
        return self._committed.items()

    def load(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces all values by ``values``: key, then parameter name."""
        self._committed = FlatValues(values)
        self._staged, self._notes = {}, {}

    def drop(self, key: str) -> None:
        """Removes every value of ``key``."""
        self._committed.drop(key)

    def nbytes(self) -> int:
        """Returns the number of bytes held, spare buffers included."""
        return self._committed.nbytes()

    # ---- inside

    def _without(
        self, key: str, layout: Layout, flat: Tensor | None, unused: Collection[str]
    ) -> Tensor | None:
        """Returns staged values in which the parameters in ``unused`` have their old values.

        A missing old value is zero here; ``commit`` removes it.
        """
        if not any(name in unused for name in layout.names):
            return flat
        if flat is None:  # a removal (of a flushed residual): the others become zeros
            before = self._committed.flat.get((key, layout))
            if before is None:
                return None
            flat = torch.zeros_like(before)
        for name, view in zip(layout.names, layout.views(flat), strict=True):
            if name in unused:
                old = self._committed.get(key, name)
                view.zero_() if old is None else view.copy_(old)
        return flat


def staged_in(memory: Memory, key: str) -> Iterator[tuple[Layout, Tensor | None, Tensor | None]]:
    """Yields what a step has staged of ``key`` so far: layout, values before and after.

    None: there were no values of this layout, or they are to be removed.
    """
    for place, flat in list(memory._staged.items()):  # at once: threads may add more
        if place[0] == key:
            yield place[1], memory._committed.flat.get(place), flat


def share_storage(flat: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors share their storage; ``Bucket.write`` stages views."""
    if other is None:
        return False
    return flat.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _spare(committed: FlatValues, staged: Mapping[Place, Tensor | None]) -> None:
    """Returns the tensors of a dropped step to the next one, unless a scheme wrote what it read."""
    for place, flat in staged.items():
        if flat is None or place[0] not in committed.reused:
            continue
        if not share_storage(flat, committed.flat.get(place)):
            committed.spare[place] = flat
