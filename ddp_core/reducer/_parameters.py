"""Finds the parameters that a reducer averages, and gives all ranks the same initial values."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core._torch import foreach_copy
from ddp_core.reducer._autograd import when_accumulated

__all__ = [
    "Trained",
    "broadcast_coalesced",
    "trained_parameters",
    "watch_frozen",
]


@dataclass(frozen=True, eq=False)
class Trained:
    """Describes one parameter that requires a gradient.

    Attributes:
        name: the (first) name of the parameter in the module.
        sparse: whether the parameter belongs to an embedding with sparse gradients.
    """

    name: str
    parameter: nn.Parameter
    sparse: bool = False


def trained_parameters(module: nn.Module, ignored: Collection[str] = ()) -> list[Trained]:
    """Returns the parameters that require a gradient, once each, in registration order."""
    sparse = {
        id(parameter)
        for inner in module.modules()
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse
        for parameter in inner.parameters(recurse=False)
    }
    return [
        Trained(name, parameter, id(parameter) in sparse)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def watch_frozen(owner: Any, ignored: Collection[str]) -> None:
    """Makes parameters that are frozen now raise when they get a gradient, which nothing averages.

    This ends when ``owner``, which has the ``module``, is gone, or another wrapper has the
    parameter. It costs nothing while parameters stay frozen.
    """
    for name, parameter in owner.module.named_parameters():
        earlier = _handles.pop(id(parameter), None)
        if earlier is not None:
            earlier.remove()
        if parameter.requires_grad or name in ignored or not _may_thaw(parameter):
            continue
        thawed = partial(_raise_thawed, weakref.ref(owner), name)
        _handles[id(parameter)] = when_accumulated(parameter, thawed)


# Handles by the parameter's identity, not by weak references, with which torch does not swap it.
# A handle of one that is gone does nothing.
_handles: dict[int, Any] = {}


def _may_thaw(parameter: Tensor) -> bool:
    kind = parameter.is_floating_point() or parameter.is_complex()
    return type(parameter) is nn.Parameter and kind and not parameter.is_inference()


def _raise_thawed(owner: weakref.ref[Any], name: str, _: Tensor) -> None:
    if owner() is None:
        return
    raise RuntimeError(
        f"the parameter {name} was frozen when DistributedDataParallel was constructed and has a "
        f"gradient now, which is not averaged: ranks would drift apart. Construct "
        f"DistributedDataParallel again after requires_grad_(True), or construct it with the "
        f"parameter trained, freeze that afterwards, and pass find_unused_parameters=True"
    )


def broadcast_coalesced(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, *, source: int, chunk_nbytes: int
) -> None:
    """Overwrites tensors with those of rank ``source``, many in one message.

    Args:
        source: a rank within the group.
        chunk_nbytes: size of a message, at most; a larger tensor is a message of its own.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        value = tensor.detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        by_kind.setdefault((value.dtype, value.device), []).append(value)
    under_way: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
    with torch.no_grad():
        for values in by_kind.values():
            for chunk in _chunks(values, chunk_nbytes):
                flat = torch.cat([value.reshape(-1) for value in chunk])
                work: Any = dist.broadcast(flat, group=group, group_src=source, async_op=True)
                if len(under_way) == 2:  # the messages in flight, and so the memory, are bounded
                    _unpack(*under_way.pop(0), copy=group.rank() != source)
                under_way.append((work, flat, chunk))
        for message in under_way:
            _unpack(*message, copy=group.rank() != source)


def _chunks(tensors: list[Tensor], nbytes: int) -> Iterable[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        tensor_nbytes = tensor.numel() * tensor.element_size()
        if chunk and size + tensor_nbytes > nbytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor_nbytes
    if chunk:
        yield chunk


def _unpack(work: dist.Work, flat: Tensor, chunk: list[Tensor], *, copy: bool) -> None:
    work.wait()
    if copy:
        parts = flat.split([tensor.numel() for tensor in chunk])
        values = [part.view(tensor.shape) for part, tensor in zip(parts, chunk, strict=True)]
        foreach_copy(chunk, values)
