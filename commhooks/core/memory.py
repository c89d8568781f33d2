"""Keeps a scheme's tensors between steps, by parameter name.

A scheme works on flat tensors, one per bucket, but buckets change (DDP rebuilds them, a resumed job
starts with others). So values are kept flat for the layout in use, and are found by parameter name
when the layout changes.

Writes of a step are staged. They take effect if every bucket of the step arrived finite, and are
dropped otherwise, so an overflow leaves residuals and factors as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from commhooks.core.flat_values import FlatValues, Initial, Place
from commhooks.core.layout import Layout
from commhooks.kernels import restore
from ddp_core import Turns

__all__ = ["Memory", "share_storage", "staged_in"]


class Memory:
    """Holds tensors by key ("residual", "powersgd.q") and parameter name."""

    def __init__(self) -> None:
        self._kept = FlatValues()
        self._staged: dict[Place, Tensor | None] = {}
        self._notes: dict[Place, Tensor] = {}
        # Of one old tensor, values go to several buckets, exchanged on several streams.
        self._moves = Turns()
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
        flat = self._kept.flat.get((key, layout))
        if flat is not None and flat.device == device:
            return flat
        with self._moves.turn(device):
            flat = torch.zeros(layout.numel, device=device, dtype=dtype)
            self._kept.collect(key, layout, flat, initial)
            # Kept, although this is no commit: the values are the same, in the layout in use.
            self._kept.put(key, layout, flat)
        return flat

    def has(self, key: str) -> bool:
        """Whether any parameter has a committed value of ``key``."""
        return self._kept.has(key)

    def get(self, key: str, name: str) -> Tensor | None:
        """Returns the committed value of one parameter, or None."""
        return self._kept.get(key, name)

    def scratch(self, key: str, layout: Layout, like: Tensor) -> Tensor:
        """Returns a flat tensor to fill and then ``write``: the one that the last commit freed.

        A new one if that does not fit.
        """
        # New pages cost the CPU more than the addition that fills them.
        self._kept.reused.add(key)
        spare = self._kept.spare.pop((key, layout), None)
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

        An exchange of an abandoned step that is still running cannot write into the next step.
        """
        step = copy.copy(self)  # shallow: committed values are shared
        step._staged, step._notes = {}, {}
        return step

    def writes_on(self, device: torch.device) -> Memory:
        """Returns a memory with the same values and, of the staged writes, those on ``device``."""
        part = self.for_step()
        part._notes = self._notes
        for place, flat in self._staged.items():
            held = self._kept.flat.get(place) if flat is None else flat
            if held is None or held.device == device:
                part._staged[place] = flat
        return part

    def commit(self, good: Tensor, left_alone: Collection[str] = ()) -> None:
        """Ends a step: commits the staged writes if ``good`` (one bool), else drops them.

        On a GPU the choice is made on the device, without waiting for it.

        Args:
            good: the verdict, a tensor of one bool.
            left_alone: parameters that did not take part in the step; their values stay.
        """
        staged, self._staged = self._staged, {}
        notes, self._notes = self._notes, {}
        absent: dict[Place, list[str]] = {}
        # Parameters that had no value have none afterwards. Zeros would count as a value, from
        # which ACP-SGD and ``IntSGD`` do not recover (docs/design/defects.md).
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
            _spare(self._kept, staged)
            return
        for (key, layout), values in notes.items():
            self._kept.put(key, layout, values)
        changes: list[tuple[Place, Tensor | None, Tensor | None]] = []
        replaced: list[tuple[Tensor, Tensor]] = []
        for (key, layout), flat in staged.items():
            # The device chooses later, so the old values have to be in this layout now.
            if not on_host and flat is not None:
                self.read(key, layout, device=flat.device, dtype=flat.dtype)
            old = self._kept.flat.get((key, layout))
            if not on_host and old is not None:
                flat = torch.zeros_like(old) if flat is None else flat  # None: a removal
                if not share_storage(flat, old):  # else a scheme wrote what it had read
                    replaced.append((flat, old.to(flat.dtype)))
            changes.append(((key, layout), flat, old))
        # The new tensors are kept, and a kernel writes the old values to them if the step was bad:
        # after a good one, as nearly all are, nothing passes through memory.
        restore(replaced, good)
        for (key, layout), flat, old in changes:
            if flat is None:
                self._kept.remove(key, layout)
                continue
            self._kept.put(key, layout, flat)
            fits = old is not None and old.shape == flat.shape and not share_storage(flat, old)
            # On a GPU the caching allocator reuses what is freed.
            if on_host and key in self._kept.reused and old is not None and fits:
                self._kept.spare[key, layout] = old
            if new := absent.get((key, layout)):
                self._kept.forget(key, layout, new)

    # ---- saving and loading

    def items(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields all committed values as (key, parameter name, tensor)."""
        return self._kept.items()

    def load(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces all values by ``values``: key, then parameter name."""
        self._kept = FlatValues(values)
        self._staged, self._notes = {}, {}

    def drop(self, key: str) -> None:
        """Removes every value of ``key``."""
        self._kept.drop(key)

    def nbytes(self) -> int:
        """Returns the number of bytes held, spare buffers included."""
        return self._kept.nbytes()

    # ---- inside

    def _without(
        self, key: str, layout: Layout, flat: Tensor | None, left_alone: Collection[str]
    ) -> Tensor | None:
        """Returns staged values in which the parameters in ``left_alone`` have their old values.

        Zeros stand for missing old values, which ``commit`` removes.
        """
        if not any(name in left_alone for name in layout.names):
            return flat
        if flat is None:  # a removal (of a flushed residual): the others become zeros
            before = self._kept.flat.get((key, layout))
            if before is None:
                return None
            flat = torch.zeros_like(before)
        for name, view in zip(layout.names, layout.views(flat), strict=True):
            if name in left_alone:
                old = self._kept.get(key, name)
                view.zero_() if old is None else view.copy_(old)
        return flat


def staged_in(memory: Memory, key: str) -> Iterator[tuple[Layout, Tensor | None, Tensor | None]]:
    """Yields what a step has staged of ``key`` so far: layout, values before and after.

    None: there were no values of this layout, or they are to be removed.
    """
    for place, flat in list(memory._staged.items()):  # at once: threads may add more
        if place[0] == key:
            yield place[1], memory._kept.flat.get(place), flat


def share_storage(flat: Tensor, other: Tensor | None) -> bool:
    """Whether two tensors share their storage; ``Bucket.write`` stages views."""
    if other is None:
        return False
    return flat.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _spare(kept: FlatValues, staged: Mapping[Place, Tensor | None]) -> None:
    """Lets the next step fill the tensors of a bad one, unless a scheme wrote what it had read."""
    for place, flat in staged.items():
        if flat is None or place[0] not in kept.reused:
            continue
        if not share_storage(flat, kept.flat.get(place)):
            kept.spare[place] = flat
