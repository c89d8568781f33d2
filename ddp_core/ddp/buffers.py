"""Buffers (batch norm's statistics, ...): the same on all ranks before or after forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_core._torch import versions_kept
from ddp_core.ddp.replica import Replica

__all__ = ["BufferHook", "Buffers"]


@dataclass
class BufferHook:
    """Replaces the broadcast from rank 0: ``hook(state, {name: buffer})``.

    It may return futures, which are awaited at the end of backward.
    """

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any
    after_forward: bool


class Buffers:
    """Keeps the buffers of a model equal on all ranks.

    Args:
        enabled: whether they do so in forward.

    Attributes:
        sync_next: whether the next forward pass does so if it is enabled: gradients were averaged
            after the one before, so parameters are the same.
        hook: does it instead of rank 0's broadcast.
        named: by name.
    """

    def __init__(self, replica: Replica, *, enabled: bool) -> None:
        self._replica, self.enabled = replica, enabled
        self.sync_next = True
        self.hook: BufferHook | None = None
        self.named: dict[str, Tensor] = {}
        self.find()

    def find(self) -> None:
        """Looks the buffers up again: modules may have put others in their place."""
        self.named = self._replica.buffers()

    @property
    def are_due(self) -> bool:
        """Whether the next forward makes them equal on all ranks."""
        return self.sync_next and self.enabled and bool(self.named)

    def are_due_when(self, *, after_forward: bool) -> bool:
        """Whether it does so then: only a hook can ask for after forward."""
        later = self.hook is not None and self.hook.after_forward
        return self.are_due and after_forward == later

    def synchronise(self, source: int) -> list[Any]:
        """Makes them equal; returns futures to await, if the hook gave any.

        Args:
            source: rank whose buffers all take (unless there is a hook).
        """
        self.find()
        values = list(self.named.values())
        # The values may change between forward and backward without autograd complaining.
        with torch.no_grad(), versions_kept(tuple(values)):
            if self.hook is not None:
                return list(self.hook.hook(self.hook.state, self.named) or ())
            self._replica.broadcast(values, source)
        return []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hook": None, "named": {}}  # a hook belongs to its process group
