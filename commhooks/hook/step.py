"""Defines ``Step``, one synchronised backward pass as a hook sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from commhooks.core.layout import Layout
from commhooks.hook.coalesce import Names
from commhooks.hook.sharded_bucket import ShardedBucket
from ddp_core import Clock, GradBucket
from ddp_core._torch import version_of

__all__ = ["Gradient", "Step", "gradients_of", "key_of", "left_alone"]


@dataclass(eq=False)
class Step:
    """Holds the facts of the step under way.

    Attributes:
        holds: whether buckets wait for the last bucket.
        timed: whether times are recorded on a GPU, too.
        device, clock: of the first bucket.
        buckets: keys of the launched buckets (:func:`key_of`); an equal key is of another step.
        passes: numbers of the backward passes that call back at their end.
        told: whether ``ddp_core`` reports the end, also without a backward pass (join).
        complete: whether the last bucket has come.
        paused: whether an inner backward pass is over; the outer pass may bring more buckets.
        parameters: number of parameters in the buckets so far, if ``holds``.
        layouts: functions that return the layouts of the dense buckets.
        regrouped: the saved buckets, if the parameters were exchanged in them.
        left_alone: names of what does not get the average, as its host says.
        gradients: parameters whose ``.grad`` may not be written, as they were at the launch.
    """

    number: int
    group: dist.ProcessGroup
    holds: bool
    timed: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clock: Clock = field(default_factory=Clock)
    buckets: list[Any] = field(default_factory=list)
    passes: set[int] = field(default_factory=set)
    told: bool = False
    complete: bool = False
    paused: bool = False
    parameters: int = 0
    layouts: list[Callable[[], Layout]] = field(default_factory=list)
    regrouped: list[Names] | None = None
    left_alone: set[str] = field(default_factory=set)
    gradients: list[Gradient] = field(default_factory=list)

    @property
    def ends_later(self) -> bool:
        """Whether the step ends when ``.grad`` is written, and not with its last bucket."""
        return self.told or bool(self.passes)


@dataclass(slots=True)
class Gradient:
    """Describes a parameter's ``.grad`` at the launch of its bucket."""

    parameter: Tensor
    version: int | None  # of ``.grad``, which every write in place raises; None: no gradient
    bucket: int  # address of the bucket's memory

    def was_left_alone(self) -> bool:
        """Whether DistributedDataParallel left ``.grad`` as it was, since no rank used it."""
        # torch's class does not tell, so its writes are looked for (docs/design/steps.md). All
        # ranks decide the same, since torch agrees on what was used, so no message is needed.
        grad = self.parameter.grad
        if grad is None:
            return self.version is None  # else an optimizer in backward has used and dropped it
        if self.version is None or grad.is_sparse:
            return False
        # A gradient that is a view of its bucket has the average without another write.
        return version_of(grad) == self.version and grad.untyped_storage().data_ptr() != self.bucket


def key_of(bucket: Any, buffer: Tensor) -> Any:
    """Returns a bucket's identity; two buckets of one step have different ones."""
    if isinstance(bucket, ShardedBucket):
        return bucket.number  # its host makes a new tensor each time
    # Buckets that torch rebuilds may get the address of the old ones, and ranks that take them for
    # those would add up different parameters. A weak reference keeps the storage's identity.
    place = None if buffer.is_sparse else StorageWeakRef(buffer.untyped_storage())
    names = tuple(bucket.names()) if isinstance(bucket, GradBucket) else None
    return bucket.index(), buffer.dtype, buffer.numel(), place, names


def gradients_of(parameters: Sequence[Tensor], buffer: Tensor) -> list[Gradient]:
    """Describes the gradients of a bucket's parameters, to be compared when the step ends."""
    bucket = buffer.untyped_storage().data_ptr()
    return [
        Gradient(parameter, None if parameter.grad is None else version_of(parameter.grad), bucket)
        for parameter in parameters
    ]


def left_alone(step: Step) -> list[Tensor]:
    """Returns the parameters whose ``.grad`` was not written in the step."""
    return [gradient.parameter for gradient in step.gradients if gradient.was_left_alone()]
