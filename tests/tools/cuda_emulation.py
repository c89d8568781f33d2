"""Runs DistributedDataParallel on the CPU by the code for CUDA: streams, events and waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch

import commhooks.hook._exchanges
import commhooks.hook._runner
from ddp_core import Drivers, Streams
from ddp_core.exchange import _clocks as clocks
from ddp_core.reducer import _backward as backward
from ddp_core.reducer import _buckets as buckets
from ddp_core.reducer import _failures as failures
from ddp_core.reducer import _launch as launch
from ddp_core.reducer import _reducer as reducer
from ddp_core.reducer import _step_exchange as step_exchange
from tests.tools.fake_torch import Device, Marks

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Gpu(Device):
    """Counts, besides, how often a bucket was looked for, and how often it was done.

    Attributes:
        behind: milliseconds by which the GPU is behind the host; with every event one passes.
    """

    def __init__(self, behind: float) -> None:
        super().__init__()
        self.pace, self.behind = 1.0, behind
        self.answers: list[bool] = []

    def work(self, milliseconds: float) -> None:
        super().work(milliseconds)
        self.done = max(self.done, self.enqueued - self.behind)


class _Outcome(launch.Outcome):
    def __init__(self, device: Any, **options: Any) -> None:
        super().__init__(GPU, **options)

    def is_done(self) -> bool:
        done = super().is_done()
        device: Any = torch.get_device_module("cuda")
        device.answers.append(done)
        return done


class _Launcher(launch.Launcher):
    def __init__(self, group: Any, name: str, device: Any) -> None:
        super().__init__(group, name, GPU)


@contextmanager
def as_gpu(behind: float = 0.0) -> Iterator[Gpu]:
    """Treats the CPU as a GPU.

    Args:
        behind: by so many milliseconds, one per event, the GPU is behind the host.
    """
    gpu, known = Gpu(behind), clocks.clock_of

    def clock_of(device: Any, *, timed: bool = True) -> clocks.Clock:
        return known(GPU, timed=timed)

    def run(
        drivers: Drivers, task: Any, device: Any, group: Any, *, may_pause: bool = False, **_: Any
    ) -> Any:
        drivers._streams = drivers._streams or Streams(group)
        return drivers._streams.run(task, CPU, may_pause=may_pause)

    with ExitStack() as patches:
        for module in (commhooks.hook._exchanges, commhooks.hook._runner, backward, step_exchange):
            patches.enter_context(mock.patch.object(module, "clock_of", clock_of))
        for owner, name, value in (
            (clocks, "_clocks", {}),
            (torch, "get_device_module", lambda name: gpu),
            (Drivers, "run", run),
            (launch, "Outcome", _Outcome),
            (reducer, "Launcher", _Launcher),
            (buckets.FlatBucket, "is_large", lambda bucket, index: False),
            (failures, "POLL_INTERVAL", timedelta(seconds=0.05)),
            (failures, "Marks", Marks),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield gpu
