"""Compares the gradients of a run before and after they are averaged."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GradientError"]


class GradientError:
    """Sums over steps the gradients of this rank and the averages that the hook returned.

    Measures how far the averages of a run are from the exact ones, as sums over the run. With error
    feedback, the average of a single step is far from the exact one, since it has what earlier
    steps did not send, but the sums are close. Without feedback they need not be.

    Args:
        parameters: parameters of a model whose gradients are replaced by averages in backward.
        bucket_nbytes: size of a bucket.

    Example:
        >>> sums = GradientError(ddp.parameters(), bucket_nbytes=2**20)
        >>> for batch in batches:
        ...     loss(ddp(batch)).backward()
        ...     sums.step()
        >>> sums.close()
        >>> sums.error()  # 0.01: all but one percent has arrived
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_nbytes: int) -> None:
        self._parameters, self._bucket_nbytes = list(parameters), bucket_nbytes
        self._local = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._received = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._arrivals: list[tuple[float, int]] = []  # time and bytes of each gradient of this step
        self._windows: list[float] = []
        self._handles = [
            parameter.register_hook(self._taking(total))
            for parameter, total in zip(self._parameters, self._local, strict=True)
        ]

    def _taking(self, total: Tensor) -> Callable[[Tensor], None]:
        """Returns a tensor hook, which autograd calls with the gradient before it is averaged."""

        def take(gradient: Tensor) -> None:
            total.add_(gradient)
            self._arrivals.append((time.perf_counter(), gradient.nbytes))

        return take

    def step(self) -> None:
        """Adds the averages of a step; called after backward, before gradients are set to zero."""
        self._windows.append(_window(self._arrivals, self._bucket_nbytes))
        self._arrivals.clear()
        for parameter, total in zip(self._parameters, self._received, strict=True):
            assert parameter.grad is not None
            total += parameter.grad

    def close(self) -> None:
        """Removes the tensor hooks."""
        for handle in self._handles:
            handle.remove()

    def error(self) -> float:
        """Returns ``|received - exact| / |exact|`` of sums over the run; all ranks call this."""
        # Sums commute with the mean over ranks, so one all-reduce per run is enough.
        exact = torch.cat([total.flatten() for total in self._local]).double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        received = torch.cat([total.flatten() for total in self._received])
        return float((received - exact).norm() / exact.norm())

    def window(self) -> float:
        """Returns the seconds from the first full bucket to the last gradient, median of the steps.

        In this time buckets travel while backward computes.
        """
        return statistics.median(self._windows)


def _window(arrivals: list[tuple[float, int]], bucket_nbytes: int) -> float:
    """Returns the seconds from the gradient that fills ``bucket_nbytes`` to the last one."""
    total = 0
    for when, nbytes in arrivals:
        total += nbytes
        if total >= bucket_nbytes:
            return arrivals[-1][0] - when
    return 0.0
