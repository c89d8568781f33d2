"""Buffers (batch norm's statistics, ...): the same on all ranks before or after forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.reducer.parameters import broadcast_coalesced

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
    """The buffers of a module that ranks keep equal.

    Args:
        ignored: names of those that they do not.
        chunk_nbytes: size of a message, at most.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: set[str],
        group: dist.ProcessGroup,
        *,
        chunk_nbytes: int,
    ) -> None:
        self._module, self._ignored = module, ignored
        self._group, self._chunk_nbytes = group, chunk_nbytes
        self.hook: BufferHook | None = None
        self.named: dict[str, Tensor] = {}
        self.find()

    def find(self) -> None:
        """Looks the buffers up anew: modules may have put others in their place."""
        self.named = {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored
        }

    def synchronise(self, source: int) -> list[Any]:
        """Makes them equal; returns futures to await, if the hook gave any.

        Args:
            source: rank whose buffers all take (unless there is a hook).
        """
        self.find()
        values = list(self.named.values())
        # The values may change between forward and backward without autograd complaining.
        preserved: Any = torch.autograd._unsafe_preserve_version_counter(tuple(values))  # type: ignore[attr-defined]
        with torch.no_grad(), preserved:
            if self.hook is not None:
                return list(self.hook.hook(self.hook.state, self.named) or ())
            broadcast_coalesced(values, self._group, source=source, chunk_nbytes=self._chunk_nbytes)
        return []
