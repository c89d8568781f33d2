"""Runs a scheme over the buckets of each step, for one rank: step count, transactions.

Knows no process group and no DDP, so that simulated ranks and real ones share it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commhooks.core.bucket import Bucket, Result
from commhooks.core.layout import Layout
from commhooks.core.memory import Memory
from commhooks.core.scheme import Scheme, slots_of
from commhooks.core.settings import check_seed
from commhooks.core.step_info import StepInfo
from commhooks.errors import SchemeError
from commhooks.kernels import all_finite
from ddp_core import AllReduce, Exchange

__all__ = ["Engine"]


@dataclass(eq=False)
class _Step:
    """What is known of a step under way."""

    memory: Memory
    launched: set[Hashable] = field(default_factory=set)
    finished: int = 0
    closed: bool = False
    failed: bool = False
    finite: list[Tensor] = field(default_factory=list)
    left_alone: Collection[str] = ()


class Engine:
    """One rank's scheme, memory and step counter.

    A step is one synchronised backward pass. It opens with its first bucket, is closed by ``end``
    (or by a bucket that is said to be the last), and is over when the exchange of its last bucket
    is. Memory is committed then, if every bucket arrived finite everywhere.
    """

    def __init__(self, scheme: Scheme, *, rank: int, world_size: int, seed: int = 0) -> None:
        self.scheme, self.rank, self.world_size = scheme, rank, world_size
        self.seed = check_seed(seed)
        self.memory = Memory()
        self.step = 0
        self.skipped = 0  # steps whose memory was left as it was
        self._lock = threading.Lock()
        self._open: _Step | None = None

    @property
    def scheme(self) -> Scheme:
        """The scheme that runs; to be replaced between steps only."""
        return self._scheme

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        # Asked for in every bucket, and put together from all wrappers.
        self._scheme, self.traits = scheme, scheme.traits
        self.keeps_memory = bool(slots_of(scheme))

    @property
    def under_way(self) -> bool:
        """Whether a step has begun and is not over."""
        return self._open is not None

    def begin_bucket(self, bucket: Hashable, *, is_last: bool = False) -> None:
        """Counts a bucket in, before its exchange starts.

        A bucket that was launched in this step already, or comes after the last one, belongs to
        the next step: the open one was abandoned.

        Args:
            bucket: its number, or anything else that is different for each bucket of a step.
            is_last: closes the step.
        """
        with self._lock:
            step = self._open
            if step is None or step.closed or bucket in step.launched:
                step = self._open = _Step(self.memory.for_step())
            step.launched.add(bucket)
            step.closed = is_last

    def end(self, left_alone: Collection[str] = ()) -> None:
        """Closes the open step: no more buckets come, and the gradients are where they belong.

        Args:
            left_alone: names of parameters whose gradient was not replaced by the average, since
                no rank has used them; their memory stays as it was.
        """
        with self._lock:
            step = self._open
            if step is None:
                return
            step.closed, step.left_alone = True, left_alone
            self._settle(step)

    def abandon(self) -> None:
        """Drops the open step, whose backward pass raised, with all it has written."""
        with self._lock:
            self._open = None

    def bucket(self, gradient: Tensor, layout: Layout | Callable[[], Layout]) -> Bucket:
        """What a scheme is given for one bucket of the current step."""
        return Bucket(
            gradient,
            layout,
            memory=self.memory if self._open is None else self._open.memory,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
        )

    def step_info(self, dtype: torch.dtype, step: int) -> StepInfo:
        """The rank in a step, for initial values of parameters of ``dtype``."""
        return StepInfo(
            memory=self.memory,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            dtype=dtype,
        )

    def exchange(self, grad: Tensor, find_layout: Layout | Callable[[], Layout]) -> Exchange:
        """The exchange of one launched bucket; returns the tensor that replaces ``grad``."""
        step, finite = self._open, None
        assert step is not None, "an exchange is launched before it runs"
        try:
            if grad.is_sparse:
                mean = yield from _exchange_sparse(grad, self.scheme)
                values = mean._values()
            elif not grad.is_floating_point():
                mean = yield from _exchange_complex(grad, self.scheme)
                values = torch.view_as_real(mean)
            else:
                result = yield from self.scheme.exchange(self.bucket(grad, find_layout))
                mean = values = self._checked(result, grad)
                finite = result.finite
            if self.keeps_memory:
                # The same bits on every rank, so the verdict needs no message.
                step.finite.append(all_finite(values) if finite is None else finite)
            return mean
        except BaseException:
            step.failed = True
            raise
        finally:
            self._finish(step)

    def _checked(self, result: Result, grad: Tensor) -> Tensor:
        """The mean in the gradient's shape and dtype, or a clear error."""
        if not isinstance(result, Result):
            raise SchemeError(
                f"{type(self.scheme).__name__}.exchange returns Result(mean, ...), "
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

    def _finish(self, step: _Step) -> None:
        with self._lock:
            step.finished += 1
            if step is self._open:  # else it was abandoned and counts for nothing
                self._settle(step)

    def _settle(self, step: _Step) -> None:
        """Commits the step if it is closed and all its exchanges are over."""
        if not step.closed or step.finished < len(step.launched):
            return
        if step.finite and not step.failed:
            good = torch.stack(step.finite).all()
            step.memory.commit(good, step.left_alone)
            if good.device.type == "cpu" and not good.item():
                self.skipped += 1
        self.step += 1
        self._open = None


def _exchange_sparse(grad: Tensor, scheme: Scheme) -> Exchange:
    """Sparse gradients travel as they are: indices and values, summed."""
    if not scheme.traits.averages:
        return grad
    result = yield AllReduce(grad)
    return result


def _exchange_complex(grad: Tensor, scheme: Scheme) -> Exchange:
    """Complex gradients are averaged as pairs of reals, uncompressed."""
    if not scheme.traits.averages:
        return grad
    if not grad.is_complex():
        raise SchemeError(f"gradients are floating point or complex, got {grad.dtype}")
    yield AllReduce(torch.view_as_real(grad))
    return grad
