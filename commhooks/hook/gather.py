"""Gathers the states of all ranks into one, on every rank or on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks._torch import device_of_objects
from commhooks.core.bytes import as_bytes
from commhooks.errors import RegistrationError
from commhooks.hook.handshake import handshake

__all__ = ["gather", "need_receiver"]

# Bytes per message. A rank then needs one buffer of this size besides the states, and not a second
# copy of the largest residual on the device.
_MESSAGE = 1 << 26
_Spec = tuple[str, str, torch.dtype, torch.Size]  # key, parameter name


def gather(
    call: str,
    state: Mapping[str, Any] | None,
    fault: str | None,
    group: dist.ProcessGroup,
    to: int | None,
    *,
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the states of all ranks of ``group`` as one, on the CPU; all ranks call it.

    Small tensors share a message, large tensors are cut; nothing is padded.

    Args:
        call: the name of the public call, for messages.
        state: this rank's state, with one part; None if this rank cannot save.
        fault: the reason why it cannot.
        to: the only rank that gets the gathered state; the others get an empty dict.
        also: further facts that must be the same on all ranks, by name.

    Raises:
        MismatchError: the ranks are not at the same step, or some of them cannot save.
        RegistrationError: no rank can save.
    """
    common = {} if state is None else {k: v for k, v in state.items() if not isinstance(v, dict)}
    # A fault takes part in the handshake instead of raising before it: the other ranks would wait.
    facts = {"what keeps it from saving": fault, "to": to, **(also or {})}
    handshake(call, {**facts, **common}, group)
    if state is None:
        raise RegistrationError(f"{call}: {fault}")
    # After the handshake all ranks have the same ``to``, so all raise.
    need_receiver(call, to, group)
    (field,) = (key for key in state if key not in common)
    part = state[field]
    tensors = [
        (key, name, value)
        for key, values in part["memory"].items()
        for name, value in values.items()
    ]
    specs: list[_Spec] = [(key, name, value.dtype, value.shape) for key, name, value in tensors]
    about = (
        field,
        {key: value for key, value in part.items() if key != "memory"},
        list(part["memory"]),  # keys without values, which ``specs`` does not show
        specs,
    )
    # Shapes as objects, values as bytes: pickling the tensors would hold all ranks' memory several
    # times on every rank, also where only one rank wants it.
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, about, group=group)
    whole = dict(common)
    for source, (theirs, rest, keys, what) in enumerate(everyone):
        mine = [value for _, _, value in tensors] if source == group.rank() else None
        arrived = _send(what, mine, source, to, group)  # on every rank, in the same order
        if to not in (None, group.rank()):
            continue
        memory: dict[str, dict[str, Tensor]] = {key: {} for key in keys}
        for (key, name, _, _), value in zip(what, arrived, strict=True):
            memory[key][name] = value
        whole[theirs] = {**rest, "memory": memory}
    return whole if to in (None, group.rank()) else {}


def need_receiver(call: str, to: int | None, group: dist.ProcessGroup) -> None:
    """Raises ValueError unless ``to`` is a rank of ``group``, or None."""
    if to is not None and not (type(to) is int and 0 <= to < group.size()):
        raise ValueError(
            f"{call}: to=... is a rank of the hook's {group.size()}, or None for all, got {to!r}"
        )


def _send(
    specs: Sequence[_Spec],
    mine: Sequence[Tensor] | None,
    source: int,
    to: int | None,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Sends the tensors of rank ``source`` and returns them, on the CPU, where they are received.

    Args:
        specs: dtypes and shapes of the tensors.
        mine: the tensors, on rank ``source``; None on the others.
    """
    # NCCL sends tensors of a GPU only, so a message goes through the group's device.
    rank, device = group.rank(), device_of_objects(group)
    receives = mine is None and to in (None, rank)
    flat: list[Tensor] = []
    if mine is not None:
        # As bytes: tensors of different dtypes share a message, and no backend sees the dtype.
        flat = [as_bytes(value.detach()) for value in mine]
        values = [value.detach().cpu() for value in mine]
    elif receives:
        values = [torch.empty(shape, dtype=dtype, device="cpu") for _, _, dtype, shape in specs]
        flat = [value.view(-1).view(torch.uint8) for value in values]
    else:
        values = []
    if to == source or not (receives or mine is not None):
        return values
    sizes = [dtype.itemsize * shape.numel() for _, _, dtype, shape in specs]
    for spans in _messages(sizes):
        total = sum(end - begin for _, begin, end in spans)
        if mine is not None:
            buffer = torch.cat([flat[index][begin:end].to(device) for index, begin, end in spans])
        else:
            buffer = torch.empty(total, dtype=torch.uint8, device=device)
        if to is None:
            dist.broadcast(buffer, group=group, group_src=source)
        elif mine is not None:
            dist.send(buffer, group=group, group_dst=to)
        else:
            dist.recv(buffer, group=group, group_src=source)
        if receives:
            pieces = buffer.cpu().split([end - begin for _, begin, end in spans])
            for (index, begin, end), piece in zip(spans, pieces, strict=True):
                flat[index][begin:end] = piece
    return values


def _messages(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields the messages, each a list of (tensor, begin, end) in bytes, in order."""
    spans: list[tuple[int, int, int]] = []
    room = _MESSAGE
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            spans.append((index, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield spans
                spans, room = [], _MESSAGE
    if spans:
        yield spans
