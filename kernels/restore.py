"""Puts old values back where a step was not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from .runtime import cpu, cuda
from .runtime.op import check, op

__all__ = ["restore"]


def restore(values: Tensor, old: Tensor, good: Tensor) -> None:
    """Overwrites ``values`` by ``old`` unless ``good`` is true.

    The host does not wait for ``good``, and where it is true, nothing passes through memory: a step
    is committed by taking its new tensors, and this op takes them back.

    Args:
        values: contiguous, any dtype.
        old: of the same dtype and number of entries.
        good: one bool.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    Example:
        >>> restore(new_residual, old_residual, torch.isfinite(mean).all())
    """
    restore_op(values, old, good)


@op("restore(Tensor(a!) values, Tensor old, Tensor good) -> ()")
def restore_op(values: Tensor, old: Tensor, good: Tensor) -> None:
    values.copy_(torch.where(good.view(()), values, old.view(values.shape)))


@restore_op.check
def _check(values: Tensor, old: Tensor, good: Tensor) -> None:
    check("restore", "values", values, like=values, dtypes=(values.dtype,))
    check("restore", "old", old, like=values, dtypes=(values.dtype,), n=values.numel())
    check("restore", "good", good, like=values, dtypes=(torch.bool,), n=1)


@restore_op.kernel("cpu")
def _restore_cpu(values: Tensor, old: Tensor, good: Tensor) -> None:
    cpu.call("restore", values, old, values.nbytes, good)


@restore_op.kernel("cuda")
def _restore_cuda(values: Tensor, old: Tensor, good: Tensor) -> None:
    nbytes = values.nbytes
    # A grid of a few blocks: nearly always it has nothing to do.
    warps = min(nbytes // 4096, 1024) + 1
    cuda.launch("restore.cu", "restore", values.device, warps, (values, old, nbytes, good))
