"""What a scheme remembers between steps: tensors by parameter name, kept if the step was good.

A scheme works on flat tensors, one per bucket; buckets come and go (DDP rebuilds them, a resumed
job starts with others). So values are kept flat for the layout in use and found by parameter name
when the layout changes.

Writes of a step are staged. They take effect when every bucket of the step arrived finite, and are
dropped otherwise, so one overflow leaves residuals and factors as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from commhooks.core.flat_values import FlatValues, Place
from commhooks.core.layout import Layout

__all__ = ["Memory"]

Initial = Callable[[str, torch.Size], Tensor | None]


class Memory:
    """Tensors by key ("residual", "powersgd.q") and parameter name."""

    def __init__(self) -> None:
        self._kept = FlatValues()
        self._staged: dict[Place, Tensor | None] = {}
        self._notes: dict[Place, Tensor] = {}

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
        """The committed values of ``key`` for ``layout``, flat; do not write into it.

        Args:
            initial: makes the value of a parameter that has none of this shape; zero without it.
        """
        flat = self._kept.flat.get((key, layout))
        if flat is not None and flat.device == device:
            return flat
        flat = torch.zeros(layout.numel, device=device, dtype=dtype)
        for name, view in zip(layout.names, layout.views(flat), strict=True):
            old = self._kept.get(key, name)
            if old is not None and old.shape == view.shape:
                view.copy_(old)
            elif initial is not None and (first := initial(name, view.shape)) is not None:
                view.copy_(first)
        self._kept.put(key, layout, flat)
        return flat

    def has(self, key: str) -> bool:
        """Whether any parameter has a committed value of ``key``."""
        return self._kept.has(key)

    def get(self, key: str, name: str) -> Tensor | None:
        """The committed value of one parameter."""
        return self._kept.get(key, name)

    def scratch(self, key: str, layout: Layout, like: Tensor) -> Tensor:
        """A flat tensor to fill and then ``write``; the one the last commit freed, where it fits.

        Fresh pages cost the CPU more than the addition that fills them.
        """
        spare = self._kept.spare.pop((key, layout), None)
        if spare is not None and spare.device == like.device and spare.dtype == like.dtype:
            return spare
        return torch.empty_like(like)

    def write(self, key: str, layout: Layout, flat: Tensor | None) -> None:
        """Stages the new values of ``key`` for ``layout``; None removes them."""
        self._staged[key, layout] = flat

    def note(self, key: str, layout: Layout, values: Tensor) -> None:
        """Stages numbers on the host, which can be read without waiting for a GPU.

        On a GPU they are taken whatever the step was, as nobody waits to know that.
        """
        self._notes[key, layout] = values

    # ---- used by the engine

    def for_step(self) -> Memory:
        """The same memory, with writes of its own that are taken or dropped together.

        What an abandoned step still writes is therefore never another step's.
        """
        step = copy.copy(self)
        step._staged, step._notes = {}, {}
        return step

    def commit(self, good: Tensor, left_alone: Collection[str] = ()) -> None:
        """Ends a step: takes the staged writes if ``good`` (one bool), else drops them.

        On CUDA the choice is made on the device, without waiting for it.

        Args:
            left_alone: parameters that did not take part in the step; they keep what they had.
        """
        staged, self._staged = self._staged, {}
        notes, self._notes = self._notes, {}
        absent: dict[Place, list[str]] = {}
        if left_alone:
            absent = {
                (key, layout): [
                    name
                    for name in layout.names
                    if name in left_alone and self._kept.get(key, name) is None
                ]
                for key, layout in staged
            }
            staged = {
                (key, layout): self._without(key, layout, flat, left_alone)
                for (key, layout), flat in staged.items()
            }
        on_host = good.device.type == "cpu"
        if on_host and not good.item():
            for place, flat in staged.items():
                if flat is not None:
                    self._kept.spare[place] = flat
            return
        for (key, layout), values in notes.items():
            self._kept.put(key, layout, values)
        for (key, layout), flat in staged.items():
            if not on_host and flat is not None:  # something to keep, should the step be bad
                self.read(key, layout, device=flat.device, dtype=flat.dtype)
            old = self._kept.flat.get((key, layout))
            if not on_host and old is not None:
                flat = torch.where(good, torch.zeros_like(old) if flat is None else flat, old)
            if flat is None:
                self._kept.remove(key, layout)
                continue
            self._kept.put(key, layout, flat)
            if on_host and old is not None and old is not flat and old.shape == flat.shape:
                self._kept.spare[key, layout] = old
            if new := absent.get((key, layout)):
                self._kept.forget(key, layout, new)

    # ---- saving and loading

    def items(self) -> Iterator[tuple[str, str, Tensor]]:
        """All committed values as (key, parameter name, tensor)."""
        return self._kept.items()

    def load(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces everything by ``values``: key, then parameter name."""
        self._kept = FlatValues(values)
        self._staged, self._notes = {}, {}

    def drop(self, key: str) -> None:
        """Forgets every value of ``key``."""
        self._kept.drop(key)

    def nbytes(self) -> int:
        """Bytes held, spare buffers included."""
        return self._kept.nbytes()

    # ---- inside

    def _without(
        self, key: str, layout: Layout, flat: Tensor | None, left_alone: Collection[str]
    ) -> Tensor | None:
        """Staged values, but for some parameters those of before; anything if there were none."""
        if not any(name in left_alone for name in layout.names):
            return flat
        if flat is None:  # all are removed, hence none of these
            before = self._kept.flat.get((key, layout))
            if before is None:
                return None
            flat = torch.zeros_like(before)
        for name, view in zip(layout.names, layout.views(flat), strict=True):
            if name in left_alone:
                old = self._kept.get(key, name)
                view.zero_() if old is None else view.copy_(old)
        return flat
