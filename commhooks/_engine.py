"""Runs a scheme over the buckets of each step, for one rank: contexts, step count, transactions.

Knows no process group and no DDP, so that simulated ranks and real ones share it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from commhooks._errors import SchemeError
from commhooks._memory import Layout, Memory
from commhooks._scheme import Context, Exchanged, Scheme
from commhooks.kernels import all_finite
from ddp_core import AllReduce, Exchange

__all__ = ["Engine"]


class Engine:
    """One rank's scheme, memory and step counter.

    A step is one synchronised backward pass: it opens with its first bucket and ends when the last
    bucket's exchange has. Memory is committed then, if every bucket arrived finite everywhere.
    """

    def __init__(self, scheme: Scheme, *, rank: int, world_size: int, seed: int = 0) -> None:
        self.scheme, self.rank, self.world_size, self.seed = scheme, rank, world_size, seed
        self.memory = Memory()
        self.step = 0
        self.skipped = 0  # steps whose memory was left as it was
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._launched: set[int] = set()
        self._finished = 0
        self._closed = False
        self._failed = False
        self._finite: list[Tensor] = []

    @property
    def under_way(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(self._launched)

    def launch(self, index: int, *, is_last: bool) -> None:
        """Counts a bucket in, before its exchange starts.

        A bucket that was already launched means that the last step was abandoned (an exception in
        backward): its staged memory is dropped and the step starts anew.
        """
        with self._lock:
            if index in self._launched or self._closed:
                self.memory.rollback()
                self._reset()
            self._launched.add(index)
            self._closed = is_last

    def context(self, output: Tensor, find_layout: Callable[[], Layout]) -> Context:
        """The context of one bucket's exchange in the current step."""
        return Context(
            memory=self.memory,
            output=output,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            find_layout=find_layout,
        )

    def exchange(self, grad: Tensor, find_layout: Callable[[], Layout]) -> Exchange:
        """The exchange of one launched bucket; returns the tensor that replaces ``grad``."""
        try:
            if grad.is_sparse:
                return (yield from _exchange_sparse(grad, self.scheme))
            if not grad.is_floating_point():
                return (yield from _exchange_complex(grad, self.scheme))
            ctx = self.context(grad, find_layout)
            result = yield from self.scheme.exchange(grad, ctx)
            mean = self._checked(result, grad)
            if self.scheme.stateful:
                # The same bits on every rank, so the verdict needs no message.
                finite = result.finite
                self._finite.append(all_finite(mean) if finite is None else finite)
            return mean
        except BaseException:
            self._failed = True
            raise
        finally:
            self._finish()

    def _checked(self, result: Exchanged, grad: Tensor) -> Tensor:
        """The mean in the gradient's shape and dtype, or a clear error."""
        if not isinstance(result, Exchanged):
            raise SchemeError(
                f"{type(self.scheme).__name__}.exchange returns Exchanged(mean, ...), "
                f"got {type(result).__name__}"
            )
        mean = result.mean
        if mean.numel() != grad.numel():
            raise SchemeError(
                f"{type(self.scheme).__name__}.exchange: the bucket has {grad.numel()} entries, "
                f"the mean has shape {tuple(mean.shape)}"
            )
        if mean.dtype != grad.dtype or mean.shape != grad.shape:
            return grad.copy_(mean.view(grad.shape))
        return mean

    def _finish(self) -> None:
        with self._lock:
            self._finished += 1
            if not self._closed or self._finished < len(self._launched):
                return
            if self._failed:
                self.memory.rollback()
            elif self._finite:
                good = torch.stack(self._finite).all()
                self.memory.commit(good)
                if good.device.type == "cpu" and not good.item():
                    self.skipped += 1
            self.step += 1
            self._reset()


def _exchange_sparse(grad: Tensor, scheme: Scheme) -> Exchange:
    """Sparse gradients travel as they are: indices and values, summed."""
    if not scheme.averages:
        return grad
    result = yield AllReduce(grad)
    return result


def _exchange_complex(grad: Tensor, scheme: Scheme) -> Exchange:
    """Complex gradients are averaged as pairs of reals, uncompressed."""
    if not scheme.averages:
        return grad
    if not grad.is_complex():
        raise SchemeError(f"gradients are floating point or complex, got {grad.dtype}")
    yield AllReduce(torch.view_as_real(grad))
    return grad
