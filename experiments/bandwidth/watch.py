"""Looks at the gradients of a run before and after they are averaged."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Watch"]


class Watch:
    """Sums, step by step, the gradients of this rank and what the hook made of them.

    Says how far what the optimizer got over a run is from the sum of exact averages. With error
    feedback a step's average is far from that step's mean, as it holds what earlier steps did not
    send; the sums over a run are near each other. Without feedback they need not be.

    Args:
        parameters: of the model, whose gradients are replaced by averages in backward.
        bucket_nbytes: of gradients that travel together.

    Example:
        >>> watch = Watch(ddp.parameters(), bucket_nbytes=2**20)
        >>> for batch in batches:
        ...     loss(ddp(batch)).backward()
        ...     watch.step()
        >>> watch.close()
        >>> watch.error()  # 0.01: all but one percent has arrived
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_nbytes: int) -> None:
        self._parameters, self._bucket_nbytes = list(parameters), bucket_nbytes
        self._local = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._received = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._arrivals: list[tuple[float, int]] = []  # of this step: when, and how many bytes
        self._windows: list[float] = []
        self._handles = [
            parameter.register_hook(self._taking(total))
            for parameter, total in zip(self._parameters, self._local, strict=True)
        ]

    def _taking(self, total: Tensor) -> Callable[[Tensor], None]:
        """A hook that autograd calls with the gradient of this rank, before it is averaged."""

        def take(gradient: Tensor) -> None:
            total.add_(gradient)
            self._arrivals.append((time.perf_counter(), gradient.nbytes))

        return take

    def step(self) -> None:
        """After backward, before gradients are set to zero: takes in what the hook delivered."""
        self._windows.append(_window(self._arrivals, self._bucket_nbytes))
        self._arrivals.clear()
        for parameter, total in zip(self._parameters, self._received, strict=True):
            assert parameter.grad is not None
            total += parameter.grad

    def close(self) -> None:
        """Backward goes on unwatched."""
        for handle in self._handles:
            handle.remove()

    def error(self) -> float:
        """``|sum of received - sum of exact| / |sum of exact|``; all ranks call it alike."""
        exact = torch.cat([total.flatten() for total in self._local]).double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        received = torch.cat([total.flatten() for total in self._received])
        return float((received - exact).norm() / exact.norm())

    def window(self) -> float:
        """Seconds of a step from its first full bucket to its last gradient, median of the steps.

        In this time buckets travel while backward still computes.
        """
        return statistics.median(self._windows)


def _window(arrivals: list[tuple[float, int]], bucket_nbytes: int) -> float:
    """Seconds from the gradient that fills ``bucket_nbytes`` to the last one."""
    total = 0
    for when, nbytes in arrivals:
        total += nbytes
        if total >= bucket_nbytes:
            return arrivals[-1][0] - when
    return 0.0
