"""Restores old values after a step that was not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.op import Entries, check, op

__all__ = ["restore"]

_MOST = 4  # pairs of a launch
Pair = tuple[Tensor, Tensor]


def restore(pairs: Sequence[Pair], good: Tensor) -> None:
    """Overwrites the first tensor of each pair by the second unless ``good`` is true.

    The host does not wait for ``good``, and where it is true, nothing passes through memory: a step
    is committed by taking its new tensors, and this op takes them back. Four pairs are one launch.

    Args:
        pairs: new and old values: contiguous, of one dtype (any) and number of entries.
        good: one bool.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Example:
        >>> restore([(new_residual, old_residual)], torch.isfinite(mean).all())
    """
    for some in _launches(pairs):
        (values, old), *others = some
        flat = [tensor for pair in others for tensor in pair]
        restore_op(values, old, good, *flat, *[None] * (2 * _MOST - 2 - len(flat)))


def _launches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Divides pairs into launches; what is written twice is written in order."""
    some: list[Pair] = []
    seen: set[int] = set()
    for pair in pairs:
        storages = {tensor.untyped_storage().data_ptr() for tensor in pair}
        if some and (len(some) == _MOST or storages & seen):
            yield some
            some, seen = [], set()
        some.append(pair)
        seen |= storages
    if some:
        yield some


@op(
    "restore(Tensor(a!) values, Tensor old, Tensor good, Tensor(b!)? values1, Tensor? old1,"
    " Tensor(c!)? values2, Tensor? old2, Tensor(d!)? values3, Tensor? old3) -> ()",
    takes={"good": Entries(torch.bool, n=1)},
)
def restore_op(values: Tensor, old: Tensor, good: Tensor, *others: Tensor | None) -> None:
    for new, before in _pairs(values, old, others):
        new.copy_(torch.where(good.view(()), new, before.view(new.shape)))


def _pairs(values: Tensor, old: Tensor, others: Sequence[Tensor | None]) -> Iterator[Pair]:
    yield values, old
    for new, before in zip(others[::2], others[1::2], strict=True):
        if new is not None and before is not None:
            yield new, before


@restore_op.check
def _check(values: Tensor, old: Tensor, good: Tensor, *others: Tensor | None) -> None:
    if any((a is None) != (b is None) for a, b in zip(others[::2], others[1::2], strict=True)):
        raise ValueError("restore: new values come with old ones")
    # Not rules, whose messages would number them: callers give a list of pairs.
    for new, before in _pairs(values, old, others):
        check("restore", "values", new, like=values, dtypes=(new.dtype,))
        check("restore", "old", before, like=values, dtypes=(new.dtype,), n=new.numel())


@restore_op.kernel("cpu")
def _restore_cpu(values: Tensor, old: Tensor, good: Tensor, *others: Tensor | None) -> None:
    for new, before in _pairs(values, old, others):
        cpu.call("restore", new, before, new.nbytes, good)


@restore_op.kernel("cuda")
def _restore_cuda(values: Tensor, old: Tensor, good: Tensor, *others: Tensor | None) -> None:
    arguments: list[Tensor | int | None] = []
    most = 0
    for new, before in _pairs(values, old, others):
        arguments += [new, before, new.nbytes]
        most = max(most, new.nbytes)
    arguments += [None, None, 0] * (_MOST - len(arguments) // 3)
    # A grid of a few blocks: nearly always it has nothing to do.
    warps = min(most // 4096, 1024) + 1
    cuda.launch("restore.cu", "restore", values.device, warps, (good, *arguments))
