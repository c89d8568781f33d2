"""Holds a step's buckets back and exchanges them as one, for schemes that ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from commhooks._memory import Layout
from ddp_core import Exchange

__all__ = ["Coalescer", "Group"]

FindLayout = Callable[[], Layout]
MakeExchange = Callable[[Tensor, FindLayout], Exchange]


@dataclass
class _Held:
    """A bucket that waits for the step's last one."""

    index: int
    buffer: Tensor
    find_layout: FindLayout
    gate: torch.futures.Future[None]
    error: Exception | None = None

    def outcome(self, _: torch.futures.Future[None]) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.buffer


@dataclass
class Group:
    """Held buckets of one dtype and device, which travel as one."""

    held: list[_Held] = field(default_factory=list)

    @property
    def index(self) -> int:
        """The first bucket's index stands for the group's."""
        return self.held[0].index

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients of the group."""
        return sum(one.buffer.numel() * one.buffer.element_size() for one in self.held)

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.held[0].buffer.device

    def exchange(self, make: MakeExchange, layouts: dict[Any, Layout]) -> Exchange:
        """The exchange of all buckets together; the result is copied back to each."""
        if len(self.held) == 1:
            one = self.held[0]
            mean = yield from make(one.buffer, one.find_layout)
            if mean is not one.buffer:
                one.buffer.copy_(mean)
            return mean

        def find_layout() -> Layout:
            parts = tuple(one.find_layout() for one in self.held)
            if parts not in layouts:
                layouts[parts] = Layout(
                    [name for part in parts for name in part.names],
                    [shape for part in parts for shape in part.shapes],
                )
            return layouts[parts]

        mean = yield from make(torch.cat([one.buffer for one in self.held]), find_layout)
        pieces = mean.split([one.buffer.numel() for one in self.held])
        for one, piece in zip(self.held, pieces, strict=True):
            one.buffer.copy_(piece)
        return mean

    def release(self, future: torch.futures.Future[Tensor]) -> None:
        """Completes the future of every bucket once the group's has completed."""
        error: Exception | None = None
        try:
            future.value()
        except Exception as raised:
            error = raised
        for one in self.held:
            one.error = error
            one.gate.set_result(None)


class Coalescer:
    """The buckets of the current step that wait for the last."""

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self.layouts: dict[Any, Layout] = {}

    def hold(
        self, index: int, buffer: Tensor, find_layout: FindLayout
    ) -> torch.futures.Future[Tensor]:
        """Keeps a bucket back; its future completes with its group."""
        if any(one.index == index for one in self._held):  # the last step was abandoned
            self._held.clear()
        on_cuda = buffer.device.type == "cuda"
        gate: torch.futures.Future[None] = (
            torch.futures.Future(devices=[buffer.device]) if on_cuda else torch.futures.Future()
        )
        one = _Held(index, buffer, find_layout, gate)
        self._held.append(one)
        return gate.then(one.outcome)

    def groups(self) -> list[Group]:
        """The held buckets, to be exchanged now; sparse ones each by themselves."""
        groups: dict[Any, Group] = {}
        for one in self._held:
            buffer = one.buffer
            key = (buffer.dtype, buffer.device, one.index if buffer.is_sparse else None)
            groups.setdefault(key, Group()).held.append(one)
        self._held = []
        return list(groups.values())
