"""Holds a step's buckets back and exchanges their parameters in other groups.

For schemes that ask for one exchange a step, and for the first steps of a resumed run, whose
buckets are not yet those that the run had when it was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commhooks.core.layout import Layout
from ddp_core import Exchange

__all__ = ["Coalescer", "Group"]

FindLayout = Callable[[], Layout]
MakeExchange = Callable[[Tensor, FindLayout], Exchange]
Names = tuple[str, ...]


@dataclass(eq=False)
class _Held:
    """A bucket that waits for its group."""

    index: int
    buffer: Tensor
    find_layout: FindLayout
    gate: torch.futures.Future[Tensor]
    waits_for: int = 0  # groups that have some of its parameters
    error: Exception | None = None

    def outcome(self, done: torch.futures.Future[Tensor]) -> Tensor:
        if self.error is not None:
            raise self.error
        return done.value()


@dataclass(eq=False)
class Group:
    """Parts of held buckets, of one dtype and device, which travel as one."""

    held: list[_Held]
    names: Names | None = None  # its parameters in order; None: all, as they lie in the buckets
    layouts: dict[Any, Layout] = field(default_factory=dict)  # that groups had before

    @property
    def index(self) -> int:
        """The first bucket's index stands for the group's."""
        return self.held[0].index

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients of the group."""
        return sum(piece.numel() * piece.element_size() for piece in self._pieces())

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.held[0].buffer.device

    @property
    def is_sparse(self) -> bool:
        """Whether it is one sparse gradient."""
        return self.held[0].buffer.is_sparse

    def find_layout(self) -> Layout:
        """Its parameters' names and shapes."""
        parts = [one.find_layout() for one in self.held]
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

    def _pieces(self) -> list[Tensor]:
        """Views of the buckets' memory, in the group's order."""
        if self.names is None:
            return [one.buffer for one in self.held]
        views: dict[str, Tensor] = {}
        for one in self.held:
            layout = one.find_layout()
            views |= zip(layout.names, one.buffer.split(layout.sizes), strict=True)
        return [views[name] for name in self.names]

    def exchange(self, make: MakeExchange) -> Exchange:
        """The exchange of all parts together; the result is copied back to the buckets."""
        if len(self.held) == 1 and self.names is None:
            one = self.held[0]
            mean = yield from make(one.buffer, one.find_layout)
            if mean is not one.buffer:
                one.buffer.copy_(mean)
            return mean
        pieces = self._pieces()
        mean = yield from make(torch.cat(pieces), self.find_layout)
        for piece, part in zip(pieces, mean.split([len(one) for one in pieces]), strict=True):
            piece.copy_(part)
        return mean

    def release(self, future: torch.futures.Future[Tensor]) -> None:
        """Completes the buckets whose last group this is, once its future has completed."""
        error: Exception | None = None
        try:
            future.value()
        except Exception as raised:
            error = raised
        for one in self.held:
            one.error = one.error or error
            one.waits_for -= 1
            if one.waits_for == 0:
                one.gate.set_result(one.buffer)


class Coalescer:
    """The buckets of the current step that wait."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._layouts: dict[Any, Layout] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(
        self, index: int, buffer: Tensor, find_layout: FindLayout
    ) -> torch.futures.Future[Tensor]:
        """Keeps a bucket back; its future completes with its group, or groups."""
        on_host = buffer.device.type == "cpu"
        gate: torch.futures.Future[Tensor] = (
            torch.futures.Future() if on_host else torch.futures.Future(devices=[buffer.device])
        )
        one = _Held(index, buffer, find_layout, gate)
        self._held.append(one)
        return gate.then(one.outcome)

    def abandon(self, reason: str) -> None:
        """Lets the held buckets go with an error: nobody exchanges them any more."""
        held, self._held = self._held, []
        for one in held:
            one.error = RuntimeError(reason)
            one.gate.set_result(one.buffer)

    def groups(self) -> list[Group]:
        """The held buckets, to be exchanged now; sparse ones each by themselves."""
        kinds: dict[Any, list[_Held]] = {}
        for one in self._held:
            buffer = one.buffer
            key = (buffer.dtype, buffer.device, one.index if buffer.is_sparse else None)
            kinds.setdefault(key, []).append(one)
        return self._let_go([Group(held, None, self._layouts) for held in kinds.values()])

    def one_by_one(self) -> list[Group]:
        """The held buckets, each a group of its own."""
        return self._let_go([Group([one]) for one in self._held])

    def groups_like(self, wanted: Sequence[Names], *, merged: bool) -> list[Group] | None:
        """The held parameters as they lay in these buckets.

        None, and all stay held, if they are others, or such a bucket has several dtypes now.

        Args:
            wanted: by bucket, names in order.
            merged: buckets of one dtype and device make one group.
        """
        dense = [one for one in self._held if not one.buffer.is_sparse]
        owner = {name: one for one in dense for name in one.find_layout().names}
        if sorted(owner) != sorted(name for names in wanted for name in names):
            return None
        groups = []
        buckets: dict[Any, Names] = {}
        for number, names in enumerate(wanted):
            kinds = {(owner[name].buffer.dtype, owner[name].buffer.device) for name in names}
            if len(kinds) != 1:
                return None
            key = kinds.pop() if merged else number
            buckets[key] = buckets.get(key, ()) + names
        for names in buckets.values():
            held = list({id(owner[name]): owner[name] for name in names}.values())
            whole = len(held) == 1 and held[0].find_layout().names == names
            groups.append(Group(held, None if whole else names, self._layouts))
        groups += [Group([one]) for one in self._held if one.buffer.is_sparse]
        return self._let_go(groups)

    def _let_go(self, groups: list[Group]) -> list[Group]:
        self._held = []
        for group in groups:
            for one in group.held:
                one.waits_for += 1
        return groups
