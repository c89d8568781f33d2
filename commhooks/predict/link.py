"""Measures the links between the ranks of a group."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from commhooks.predict.fabric import Fabric, Link
from ddp_core import AllReduce

__all__ = ["measure_link"]


def measure_link(group: dist.ProcessGroup, *, budget_s: float = 10.0) -> Fabric:
    """Returns the fabric between the ranks of ``group``, which all call it.

    Args:
        group: the ranks.
        budget_s: seconds that the measurement takes, about.
    """
    n, found = group.size(), []
    for numel in (256, 2**20):
        request = AllReduce(torch.ones(numel), "sum")
        times, cores = [], []
        for _ in range(5):
            begin, core = time.perf_counter(), time.process_time()
            request.issue(group).wait()
            times.append(time.perf_counter() - begin)
            cores.append((time.process_time() - core) / request.wire_nbytes(n))
        found.append((request.wire_nbytes(n), statistics.median(times), statistics.median(cores)))
    (few, short, _), (many, long, core) = found
    values = [short / 2 / (n - 1), max(long - short, 1e-9) / (many - few), core]
    worst = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    latency, byte_s, core = worst.tolist()
    return Fabric("measured", Link(latency, 1 / byte_s), library="gloo", core_s_per_byte=core)
