"""``Step``: one synchronised backward pass, as a hook sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from commhooks.core.layout import Layout
from commhooks.hook.coalesce import Names
from ddp_core import GradBucket

__all__ = ["Gradient", "Step", "gradients_of", "key_of", "left_alone"]


@dataclass(eq=False)
class Step:
    """The step under way.

    Attributes:
        holds: buckets wait for the last one.
        buckets: what each one launched is known by; equal ones are of two steps.
        passes: backward passes that tell when they are over.
        told: ``ddp_core`` says when it is over, also without a backward pass (join).
        complete: the last bucket has come.
        layouts: of the dense buckets.
        regrouped: the saved buckets, if the parameters travelled in them.
        paused: an inner backward pass is over; the outer one may bring more buckets.
        gradients: parameters that may be left alone, with what their gradient was at the launch.
    """

    number: int
    group: dist.ProcessGroup
    holds: bool
    buckets: list[Any] = field(default_factory=list)
    passes: set[int] = field(default_factory=set)
    told: bool = False
    complete: bool = False
    paused: bool = False
    parameters: int = 0
    layouts: list[Callable[[], Layout]] = field(default_factory=list)
    regrouped: list[Names] | None = None
    gradients: list[Gradient] = field(default_factory=list)

    @property
    def ends_later(self) -> bool:
        """Whether the step is over when its gradients have landed, not with its last bucket."""
        return self.told or bool(self.passes)


@dataclass(slots=True)
class Gradient:
    """What a parameter's ``grad`` was when its bucket was launched."""

    parameter: Tensor
    version: int | None  # None: there was no gradient
    bucket: int  # address of the bucket's memory

    def was_left_alone(self) -> bool:
        """Whether DistributedDataParallel has not written the average, as no rank used it."""
        grad = self.parameter.grad
        if grad is None:
            return self.version is None  # else an optimizer in backward has used it
        if self.version is None or grad.is_sparse:
            return False
        return grad._version == self.version and grad.untyped_storage().data_ptr() != self.bucket


def key_of(bucket: Any, buffer: Tensor) -> Any:
    """A bucket's identity: two equal ones are of different steps."""
    # An address is used again when buckets are rebuilt; not while it is weakly held.
    place = None if buffer.is_sparse else StorageWeakRef(buffer.untyped_storage())
    names = tuple(bucket.names()) if isinstance(bucket, GradBucket) else None
    return bucket.index(), buffer.dtype, buffer.numel(), place, names


def gradients_of(parameters: Sequence[Tensor], buffer: Tensor) -> list[Gradient]:
    bucket = buffer.untyped_storage().data_ptr()
    return [
        Gradient(one, None if one.grad is None else one.grad._version, bucket) for one in parameters
    ]


def left_alone(step: Step) -> list[Tensor]:
    return [one.parameter for one in step.gradients if one.was_left_alone()]
