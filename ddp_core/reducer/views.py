"""Where the gradients of several parameters lie in a flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_numbers", "flat_buffer", "same_memory", "views_of"]


def flat_buffer(parameters: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Returns an uninitialised flat tensor for the gradients of parameters of one kind.

    Args:
        dtype: of the tensor, where parameters are real; their own by default.
    """
    first = parameters[0]
    numel = sum(one.numel() for one in parameters)
    kind = dtype if dtype is not None and first.is_floating_point() else first.dtype
    # Complex parameters lie in the buffer as pairs of reals, as every collective and every scheme
    # understands them; their views are complex again.
    return torch.empty(
        numel * (2 if first.is_complex() else 1),
        dtype=kind.to_real() if kind.is_complex else kind,
        device=first.device,
    )


def as_numbers(buffer: Tensor, parameter: Tensor) -> Tensor:
    """Returns a buffer as numbers of its parameters' kind: complex ones, where those are."""
    if parameter.is_complex() and not buffer.is_complex():
        return torch.view_as_complex(buffer.view(-1, 2))
    return buffer


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns a view per parameter, with its shape and, where it has no gaps, its strides."""
    views = []
    offset = 0
    for parameter in parameters:
        source = torch.view_as_complex(flat.view(-1, 2)) if parameter.is_complex() else flat
        numel = parameter.numel()
        if _is_dense(parameter):
            # Strides of the parameter: autograd keeps a gradient with these as it is, and would
            # copy another one (channels last).
            start = source.storage_offset() + offset
            view = source.as_strided(parameter.shape, parameter.stride(), start)
        else:
            view = source.narrow(0, offset, numel).view(parameter.shape)
        views.append(view)
        offset += numel
    return views


def _is_dense(tensor: Tensor) -> bool:
    """Whether its entries fill a block of memory without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are one, or begin at one address and have one dtype."""
    return left is right or (
        not left.is_sparse  # has no address
        and not right.is_sparse
        and left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
    )
