"""The parameters a reducer is responsible for: which they are, that all ranks have the same, and
that all ranks start from the same values."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ddp_core.exchange.devices import on_device_of
from ddp_core.exchange.errors import MismatchError
from ddp_core.reducer.accumulators import when_accumulated

__all__ = [
    "Trained",
    "broadcast_coalesced",
    "refuse_thawed",
    "trained_parameters",
    "verify_across_ranks",
]


@dataclass(frozen=True, eq=False)
class Trained:
    """Describes one parameter that requires a gradient.

    Attributes:
        name: its (first) name in the module.
        sparse: whether it belongs to an embedding with sparse gradients.
    """

    name: str
    parameter: nn.Parameter
    sparse: bool = False


def trained_parameters(module: nn.Module, ignored: Collection[str] = ()) -> list[Trained]:
    """Returns those that require a gradient, without ``ignored``, each once, as registered."""
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


def refuse_thawed(owner: Any, ignored: Collection[str]) -> None:
    """Makes parameters that are frozen now raise when a gradient comes, which nobody averages.

    Until ``owner``, which has the ``module``, is gone, or another one has the parameter. It
    costs nothing where they stay frozen.
    """
    for name, parameter in owner.module.named_parameters():
        earlier = _refusals.pop(parameter, None)
        if earlier is not None:
            earlier.remove()
        if parameter.requires_grad or name in ignored or not _may_thaw(parameter):
            continue
        refuse = partial(_thawed, weakref.ref(owner), name)
        _refusals[parameter] = when_accumulated(parameter, refuse)


_refusals: WeakIdKeyDictionary = WeakIdKeyDictionary()  # handles, by parameter


def _may_thaw(parameter: Tensor) -> bool:
    kind = parameter.is_floating_point() or parameter.is_complex()
    return type(parameter) is nn.Parameter and kind and not parameter.is_inference()


def _thawed(owner: weakref.ref[Any], name: str, _: Tensor) -> None:
    if owner() is None:
        return
    raise RuntimeError(
        f"the parameter {name} was frozen when DistributedDataParallel was constructed and has a "
        f"gradient now, which is not averaged: ranks would drift apart. Construct "
        f"DistributedDataParallel again after requires_grad_(True), or construct it with the "
        f"parameter trained, freeze that afterwards, and pass find_unused_parameters=True"
    )


def verify_across_ranks(
    parameters: Sequence[Trained], group: dist.ProcessGroup, *, weighted: str | None = None
) -> None:
    """Raises on every rank if the ranks' parameters differ in number, shape, strides or dtype.

    Args:
        weighted: decides what messages a step has, so it has to be the same, too.

    Raises:
        MismatchError: names the first parameter that differs.
    """
    facts = [
        (one.name, tuple(one.parameter.shape), one.parameter.stride(), str(one.parameter.dtype))
        for one in parameters
    ]
    text = repr([fact[1:] for fact in facts]).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    device = parameters[0].parameter.device if parameters else torch.device("cpu")
    kinds = (None, "mean", "sum")
    mine = torch.tensor([len(facts), digest, kinds.index(weighted)], device=device)
    # Three numbers first: names and shapes of a large model travel only where they differ.
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    if all(torch.equal(other, mine) for other in everyone):  # equal here on all ranks or on none
        return
    weightings = [kinds[int(other[2])] for other in everyone]
    if len(set(weightings)) > 1:
        raise MismatchError(
            f"DistributedDataParallel(weighted=...) has to be the same on all ranks, got "
            f"{', '.join(f'{kind!r} on rank {rank}' for rank, kind in enumerate(weightings))}"
        )
    details: list[Any] = [None] * group.size()
    with on_device_of(one.parameter for one in parameters):
        dist.all_gather_object(details, facts, group=group)
    for rank, theirs in enumerate(details):
        if len(theirs) != len(details[0]):
            raise MismatchError(
                f"DDP expects same model across all ranks, but Rank 0 has {len(details[0])} "
                f"params, while rank {rank} has inconsistent {len(theirs)} params. "
                f"{_first_difference(details[0], theirs, rank)}"
            )
    for rank, theirs in enumerate(details):
        if [fact[1:] for fact in theirs] != [fact[1:] for fact in details[0]]:
            raise MismatchError(
                f"DDP expects same model across all ranks: "
                f"{_first_difference(details[0], theirs, rank)}"
            )


def _first_difference(reference: list[Any], theirs: list[Any], rank: int) -> str:
    for position, (left, right) in enumerate(zip(reference, theirs, strict=False)):
        if left[1:] != right[1:]:
            return (
                f"params[{position}] is {_describe(left)} on rank 0, "
                f"{_describe(right)} on rank {rank}"
            )
    longer, owner = (reference, 0) if len(reference) > len(theirs) else (theirs, rank)
    extra = longer[min(len(reference), len(theirs))]
    return f"The first that only rank {owner} has is {_describe(extra)}"


def _describe(fact: tuple[str, tuple[int, ...], tuple[int, ...], str]) -> str:
    name, shape, stride, dtype = fact
    return f"{name!r} with sizes {list(shape)}, strides {list(stride)}, {dtype}"


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
        for one in under_way:
            _unpack(*one, copy=group.rank() != source)


def _chunks(tensors: list[Tensor], nbytes: int) -> Iterable[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if chunk and size + own > nbytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += own
    if chunk:
        yield chunk


def _unpack(work: dist.Work, flat: Tensor, chunk: list[Tensor], *, copy: bool) -> None:
    work.wait()
    if copy:
        parts = flat.split([tensor.numel() for tensor in chunk])
        values = [part.view(tensor.shape) for part, tensor in zip(parts, chunk, strict=True)]
        torch._foreach_copy_(chunk, values)
