"""Who drives an exchange: lanes on the host, a side stream on a device; made when needed."""

from __future__ import annotations

from collections.abc import Set

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.exchange.lanes import Lanes
from ddp_core.exchange.streams import Streams, stream_module
from ddp_core.exchange.task import Task

__all__ = ["Drivers"]


class Drivers:
    """Holds the drivers of one hook, which are made when they are needed.

    Args:
        rounds: collectives per bucket, at most; grows by ``ensure``.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._lanes: Lanes | None = None
        self._streams: Streams | None = None

    def ensure(self, rounds: int) -> None:
        """Allows so many rounds from now on; all ranks call it, between two steps."""
        self._rounds = max(rounds, self._rounds)
        if self._lanes is not None:  # else they are made with this number
            self._lanes.ensure(rounds)

    def check(self, devices: Set[str]) -> None:
        """Raises if exchanges cannot run on one of these types of device.

        Raises:
            RuntimeError: it is not the host's, and has no streams.
        """
        for device in devices - {"cpu"}:
            stream_module(device)

    def open_lanes(self, group: dist.ProcessGroup) -> Lanes:
        """Makes the lanes and their groups, a collective, unless they are there."""
        if self._lanes is None:
            self._lanes = Lanes(group, self._rounds)
        return self._lanes

    def run(
        self,
        task: Task,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        waits: bool = False,
    ) -> torch.futures.Future[Tensor]:
        """Starts an exchange of a bucket on ``device`` and returns the future of its result.

        Args:
            waits: whether the caller waits for the future before it does anything else.
        """
        if device.type == "cpu":
            lanes = self.open_lanes(group)
            return lanes.run_here(task) if waits else lanes.run(task)
        # One group for all rounds: an exchange is enqueued to its end before the next one.
        if self._streams is None:
            self._streams = Streams(group)
        return self._streams.run(task, device)

    def join(self) -> None:
        """Makes the caller's streams wait for all exchanges so far; the host does not wait."""
        if self._streams is not None:
            self._streams.join()

    def abandon(self) -> None:
        """Closes without waiting for other ranks; what is needed later is made for other ranks."""
        if self._lanes is not None:
            self._lanes.abandon()
        if self._streams is not None:
            self._streams.close()
        self._lanes = self._streams = None

    def close(self) -> None:
        """Stops the lanes' thread and gives back the extra groups. Safe to call twice."""
        if self._lanes is not None:
            self._lanes.close()
        if self._streams is not None:
            self._streams.close()
        self._lanes = self._streams = None
