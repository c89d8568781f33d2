"""Holds a step's buckets, and exchanges their parameters in other groups.

Serves schemes that coalesce, buckets that are too large for a scheme, and the first steps of a
resumed run on torch's class, whose buckets differ from the saved run's (``docs/design/steps.md``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commhooks.core._layout import Layout
from commhooks.core._memory import share_storage
from ddp_core import Exchange, StreamOrder, future_on

__all__ = ["Coalescer", "Group"]

FindLayout = Callable[[], Layout]
MakeExchange = Callable[[Tensor, FindLayout], Exchange]
Names = tuple[str, ...]


@dataclass(eq=False)
class _HeldBucket:
    """Holds a bucket that waits for the groups of its parameters."""

    index: int
    buffer: Tensor
    find_layout: FindLayout
    gate: torch.futures.Future[Tensor]
    waits_for: int = 0  # number of groups that have some of its parameters
    error: Exception | None = None
    # Of its groups, exchanged on several streams.
    turns: StreamOrder = field(default_factory=StreamOrder)

    # The error is raised here, in ``then``, and not set by ``Future.set_exception``, which only
    # Python sees: torch's reducer would take the exception for the result. The gate completes with
    # the bucket, since a CUDA future records events for the tensors that it completes with.
    def outcome(self, done: torch.futures.Future[Tensor]) -> Tensor:
        if self.error is not None:
            raise self.error
        return done.value()


@dataclass(eq=False)
class Group:
    """Exchanges parts of held buckets, of one dtype and device, as one tensor."""

    held: list[_HeldBucket]
    names: Names | None = None  # parameters in order; None: all, in the order of the buckets
    # Shared by all steps: a new ``Layout`` hashes all names, and memory is looked up by it.
    layouts: dict[Any, Layout] = field(default_factory=dict)

    @property
    def index(self) -> int:
        """Returns the first bucket's index, by which the ledger names the group."""
        return self.held[0].index

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes of the group's gradients."""
        return sum(piece.numel() * piece.element_size() for piece in self._pieces())

    @property
    def device(self) -> torch.device:
        """Returns the device of the gradients."""
        return self.held[0].buffer.device

    def find_layout(self) -> Layout:
        """Returns the names and shapes of the group's parameters."""
        parts = [held.find_layout() for held in self.held]
        key = (self.names, *parts)
        if key not in self.layouts:
            shapes = {
                name: shape
                for part in parts
                for name, shape in zip(part.names, part.shapes, strict=True)
            }
            names = tuple(shapes) if self.names is None else self.names
            self.layouts[key] = Layout(names, [shapes[name] for name in names])
        return self.layouts[key]

    def cut(self, most: int) -> list[Group]:
        """Cuts the group between parameters into groups of at most ``most`` entries."""
        whole = self.held[0].buffer
        # What is sparse or complex is exchanged uncompressed, whatever its size.
        if whole.is_sparse or not whole.is_floating_point():
            return [self]
        if sum(held.buffer.numel() for held in self.held) <= most:
            return [self]
        layout = self.find_layout()
        parts: list[list[str]] = []
        filled = most
        for name, size in zip(layout.names, layout.sizes, strict=True):
            if filled + size > most:
                parts.append([])
                filled = 0
            parts[-1].append(name)
            filled += size
        if len(parts) == 1:
            return [self]
        owner = {name: held for held in self.held for name in held.find_layout().names}
        return [
            Group(
                list({id(owner[name]): owner[name] for name in names}.values()),
                tuple(names),
                self.layouts,
            )
            for names in parts
        ]

    def _pieces(self) -> list[Tensor]:
        """Returns views of the buckets' memory, in the group's order."""
        if self.names is None:
            return [held.buffer for held in self.held]
        views: dict[str, Tensor] = {}
        for held in self.held:
            layout = held.find_layout()
            # A layout counts a complex entry as two reals.
            reals = 2 if held.buffer.is_complex() else 1
            sizes = [size // reals for size in layout.sizes]
            views |= zip(layout.names, held.buffer.split(sizes), strict=True)
        return [views[name] for name in self.names]

    def exchange(self, make: MakeExchange) -> Exchange:
        """Exchanges all parts together and copies the result back to the buckets."""
        # One whole bucket needs no copy; a sparse one could not be split.
        if len(self.held) == 1 and self.names is None:
            held = self.held[0]
            mean = yield from make(held.buffer, held.find_layout)
            if mean is not held.buffer:
                held.buffer.copy_(mean)
            return mean
        pieces = self._pieces()
        joined = _joined(pieces)
        mean = yield from make(
            joined if joined is not None else torch.cat(pieces), self.find_layout
        )
        if joined is not None:
            if mean is not joined:
                joined.copy_(mean)
            return mean
        for piece, part in zip(pieces, mean.split([len(piece) for piece in pieces]), strict=True):
            piece.copy_(part)
        return mean

    def release(self, future: torch.futures.Future[Tensor]) -> None:
        """Completes the buckets that wait for no other group; called with this group's future."""
        error: Exception | None = None
        try:
            future.value()
        except Exception as raised:
            error = raised
        for held in self.held:
            held.error = held.error or error
            held.waits_for -= 1
            # Called on a stream that waits for this group alone; the last one to come waits for
            # the others here, and the gate for it.
            with held.turns.turn(held.buffer.device):
                if held.waits_for == 0:
                    held.gate.set_result(held.buffer)


def _joined(pieces: Sequence[Tensor]) -> Tensor | None:
    """Returns flat tensors that follow each other in memory as one; None if they do not."""
    first, end = pieces[0], pieces[0].storage_offset()
    for piece in pieces:
        if piece.storage_offset() != end or not share_storage(piece, first):
            return None
        end += piece.numel()
    # A part of a bucket that is cut may be as large as half of the device's memory.
    return first.as_strided((end - first.storage_offset(),), (1,))


class Coalescer:
    """Holds the buckets of the current step, and divides them into groups.

    Args:
        most: number of entries of a group, at most; see :class:`commhooks.core.Traits`.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self.most = most
        self._held: list[_HeldBucket] = []
        self._layouts: dict[Any, Layout] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(
        self, index: int, buffer: Tensor, find_layout: FindLayout
    ) -> torch.futures.Future[Tensor]:
        """Holds a bucket; the future completes after the last group that has parts of it."""
        held = _HeldBucket(index, buffer, find_layout, future_on(buffer.device))
        self._held.append(held)
        return held.gate.then(held.outcome)

    def abort(self, reason: str) -> None:
        """Completes the held buckets with an error, since they will not be exchanged."""
        # Their futures may be waited for: without a result the next forward pass would hang.
        buckets, self._held = self._held, []
        for held in buckets:
            held.error = RuntimeError(reason)
            held.gate.set_result(held.buffer)

    def groups(self) -> list[Group]:
        """Releases the held buckets, one group per dtype and device; a sparse bucket is a group."""
        kinds: dict[Any, list[_HeldBucket]] = {}
        for held in self._held:
            buffer = held.buffer
            key = (buffer.dtype, buffer.device, held.index if buffer.is_sparse else None)
            kinds.setdefault(key, []).append(held)
        return self._release([Group(members, None, self._layouts) for members in kinds.values()])

    def one_by_one(self) -> list[Group]:
        """Releases the held buckets, one group per bucket."""
        return self._release([Group([held]) for held in self._held])

    def groups_like(self, layout: Sequence[Names], *, merged: bool) -> list[Group] | None:
        """Releases the held buckets, with their parameters in the groups of earlier buckets.

        Returns None, and holds the buckets, if the parameters are not the same, or if parameters of
        an earlier bucket have several dtypes now.

        Args:
            layout: the names of each earlier bucket, in order.
            merged: one group for all buckets of one dtype and device.
        """
        dense = [held for held in self._held if not held.buffer.is_sparse]
        owner = {name: held for held in dense for name in held.find_layout().names}
        if sorted(owner) != sorted(name for names in layout for name in names):
            return None
        groups = []
        buckets: dict[Any, Names] = {}
        for number, names in enumerate(layout):
            kinds = {(owner[name].buffer.dtype, owner[name].buffer.device) for name in names}
            if len(kinds) != 1:
                return None
            key = kinds.pop() if merged else number
            buckets[key] = buckets.get(key, ()) + names
        for names in buckets.values():
            members = list({id(owner[name]): owner[name] for name in names}.values())
            whole = len(members) == 1 and members[0].find_layout().names == names
            groups.append(Group(members, None if whole else names, self._layouts))
        groups += [Group([held]) for held in self._held if held.buffer.is_sparse]
        return self._release(groups)

    def _release(self, groups: list[Group]) -> list[Group]:
        self._held = []
        groups = [part for group in groups for part in group.cut(self.most)]
        # All counts before the first exchange: a group that ends at once would otherwise complete a
        # bucket whose other parameters are still to come.
        for group in groups:
            for held in group.held:
                held.waits_for += 1
        return groups
