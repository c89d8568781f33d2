"""Times ways to do one thing in turns, and compares the times turn by turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["in_turns", "quartiles", "seconds_per_step", "train_step"]

T = TypeVar("T")


def in_turns(calls: Mapping[str, Callable[[], T]], turns: int) -> list[dict[str, T]]:
    """Makes all calls in each turn; returns their results, a dictionary per turn.

    Every second turn has the reversed order, so that no call always runs behind the same one.
    """
    names = list(calls)
    return [
        {name: calls[name]() for name in names[:: 1 if turn % 2 == 0 else -1]}
        for turn in range(turns)
    ]


def seconds_per_step(step: Callable[[], Any], count: int = 1) -> float:
    """Returns the seconds per step of the slowest rank; all ranks begin at once."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    seconds = torch.tensor((time.perf_counter() - begin) / count, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def train_step(model: nn.Module, x: Tensor) -> None:
    """Runs a forward and a backward pass, and the smallest step that moves the parameters."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    model(x).float().square().mean().backward()
    # Not an optimizer: its time would be the same in all ways, and hide a part of the ratio.
    with torch.no_grad():
        torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-1e-4)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the first quartile, the median and the third quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high
