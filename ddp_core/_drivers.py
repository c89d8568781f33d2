"""Who drives an exchange: lanes for host tensors, a side stream for CUDA ones; made when needed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core._lanes import Lanes
from ddp_core._streams import Streams
from ddp_core._task import Task

__all__ = ["Drivers"]


class Drivers:
    """The drivers of one hook.

    Args:
        rounds: collectives per bucket, at most; grows by ``ensure``.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._lanes: Lanes | None = None
        self._streams: Streams | None = None

    def ensure(self, rounds: int) -> None:
        """From now on exchanges may have so many rounds; all ranks call it, between two steps."""
        self._rounds = max(rounds, self._rounds)
        if self._lanes is not None:
            self._lanes.ensure(rounds)

    def open_lanes(self, group: dist.ProcessGroup) -> Lanes:
        """Makes the lanes and their groups, a collective, unless they are there."""
        if self._lanes is None:
            self._lanes = Lanes(group, self._rounds)
        return self._lanes

    def run(
        self, task: Task, device: torch.device, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        """Starts an exchange of a bucket on ``device`` and returns the future of its result."""
        if device.type != "cuda":
            return self.open_lanes(group).run(task)
        if self._streams is None:
            self._streams = Streams(group)
        return self._streams.run(task, device)

    def close(self) -> None:
        """Stops the lanes' thread and destroys the extra groups. Safe to call twice."""
        if self._lanes is not None:
            self._lanes.close()
        if self._streams is not None:
            self._streams.close()
        self._lanes = self._streams = None
