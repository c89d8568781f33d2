"""Finds the ranks whose averages, parameters or optimizer state differ from those of most ranks.

A tensor is hashed to an integer that depends on every bit and on every position, the same on every
device, so that ranks compare 8 bytes of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from commhooks.core._scheme import Scheme, walk
from commhooks.errors import RegistrationError, VerificationError
from ddp_core.exchange._errors import ranks_in_words

__all__ = [
    "check_equal",
    "describe_others",
    "hashes",
    "hashes_of",
    "keeps_equal",
    "local_part",
    "minority_ranks",
    "state_of",
]

_CHUNK = 2**17  # integers that are hashed at a time: they stay in a CPU's cache, and in its heap


def keeps_equal(scheme: Scheme) -> bool:
    """Whether equal parameters stay equal, since all ranks get the same bits of every average."""
    # Of every part: a schedule with local steps has the traits of its other ones, too.
    return all(part.traits.agrees and part.traits.averages for part in walk(scheme))


# ---- hashes


def hashes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Hashes each tensor, of any dtype and strides, to an integer on the first one's device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
    hashed: list[Tensor] = []
    for places in kinds.values():
        some = [tensors[place].detach() for place in places]
        hashed += [hashes(*joined) for joined in _joined(some)]
    if not hashed:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    device = tensors[0].device
    together = torch.cat([part.to(device, non_blocking=True) for part in hashed])
    if len(kinds) == 1:
        return together
    order = torch.tensor([place for places in kinds.values() for place in places], device="cpu")
    return together[order.argsort().to(device)]


def _joined(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[int]]]:
    """Yields the entries of successive tensors of one dtype, one after the other, and sizes."""
    waiting: list[Tensor] = []
    room = _CHUNK
    for tensor in tensors:
        large = tensor.numel() >= _CHUNK  # by itself: it is not copied
        if waiting and (large or tensor.numel() > room):
            yield torch.cat(waiting), [tensor.numel() for tensor in waiting]
            waiting, room = [], _CHUNK
        if large:
            yield tensor.reshape(-1), [tensor.numel()]
        else:
            waiting.append(tensor.reshape(-1))
            room -= tensor.numel()
    if waiting:
        yield torch.cat(waiting), [tensor.numel() for tensor in waiting]


def hashes(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Hashes successive parts of a flat tensor; every bit and position counts."""
    # In 32 bits, modulo 2^32: six times as fast as in 64. An odd multiplier per place, so that a
    # change of one entry changes the sum. An entry of 64 bits counts as two.
    words = max(1, flat.element_size() // 4)
    integer = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    # Zero has two forms, which count as equal. There is no sum of floating numbers of 8 bits.
    inexact = flat.element_size() > 1 and (flat.is_floating_point() or flat.is_complex())
    low, high = _multipliers(flat.device)
    sums: list[Tensor] = []
    owners: list[int] = []
    parameter, left = 0, sizes[0] if sizes else 0
    for number, chunk in enumerate(flat.split(_CHUNK // max(2, words))):
        spans = []
        room = chunk.numel()
        while room:
            while not left:
                parameter, left = parameter + 1, sizes[parameter + 1]
            taken = min(room, left)
            spans.append((parameter, taken))
            room, left = room - taken, left - taken
        if not spans:
            continue
        # A copy in any case: the next lines write to it.
        copy = chunk.add(0.0) if inexact else chunk.clone()
        bits = copy.view(integer).to(torch.int32)
        upper = bits >> 16 if integer == torch.int32 else None
        bits.mul_(low[: len(bits)])
        if upper is not None:
            # An odd multiple of the sign bit is the sign bit again, so that every second pair of
            # signs would cancel: the upper bits count a second time, further down.
            bits.add_(upper.mul_(high[: len(bits)]))
        owners += [owner for owner, _ in spans]
        span_sums = _sums_of_spans(bits, [taken * words for _, taken in spans])
        sums.append(span_sums.mul_(2 * number + 1))
    if not sums:
        return torch.zeros(len(sizes), dtype=torch.int64, device=flat.device)
    places = torch.tensor(owners, dtype=torch.int64, device=flat.device)
    return sums[0].new_zeros(len(sizes)).index_add_(0, places, torch.cat(sums))


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns odd numbers, one per place in a chunk, for the lower and the upper bits."""
    # A copy from the host is over when it returns: any stream of a GPU may read what is kept.
    places = torch.arange(_CHUNK, dtype=torch.int32, device="cpu")
    low = places.mul(0x4C957F2D & ~1).add_(0x2545F491)
    return low.to(device), places.mul_(0x5851F42D & ~1).add_(0x14057B7F).to(device)


def _sums_of_spans(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the sum in 64 bits of each of successive spans of integers."""
    if len(sizes) == 1:
        return values.sum(dtype=torch.int64).view(1)
    # One pass over all of them, and exact: integers wrap around.
    ends = torch.tensor([*accumulate(sizes)], device=values.device)
    sums = values.cumsum(0, dtype=torch.int64)[ends - 1]
    return sums.diff(prepend=sums.new_zeros(1))


# ---- who differs


def minority_ranks(values: Sequence[Any]) -> list[int]:
    """Returns the ranks whose value differs from most; in a tie, from rank 0's."""
    counts = Counter(values)
    most = max(counts.values())
    usual = next(value for value in values if counts[value] == most)
    return [rank for rank, value in enumerate(values) if value != usual]


def describe_others(which: Sequence[int], count: int) -> str:
    """Describes the ranks that are not in ``which``, and whether they agree."""
    others = [rank for rank in range(count) if rank not in which]
    if len(others) == 1:
        why = "at least one of the two is wrong" if count == 2 else "no two ranks need agree"
    else:
        why = "which agree"
    return f"{ranks_in_words(others)}: {why}"


# ---- once, on request


def check_equal(
    call: str, compared: Mapping[str, Any], gather: Callable[..., list[dict[str, str]]]
) -> None:
    """Raises on every rank if values differ between ranks; all ranks call it.

    Args:
        call: the name of the public call.
        compared: tensors, and other values that are compared as text, by name.
        gather: returns the ``message`` of all ranks.

    Raises:
        VerificationError: values differ; names the first, and the ranks that differ from most.
        MissingRankError: not all ranks came.
    """
    everyone = gather(message=_described(compared))
    wrong = []
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        values = [theirs.get(name, "nothing") for theirs in everyone]
        if which := minority_ranks(values):
            wrong.append((name, which, values))
    if not wrong:
        return
    name, which, values = wrong[0]
    usual = next(rank for rank in range(len(values)) if rank not in which)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise VerificationError(
        f"{call}: {name}{more} differs: {ranks_in_words(which)} ha{'ve' if which[1:] else 's'} "
        f"{values[which[0]]}, other than {values[usual]} on {describe_others(which, len(values))}. "
        f"Ranks with other values train different models: load one checkpoint on all of them"
    )


def state_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Returns settings and state of an optimizer, by name.

    Args:
        names: names of parameters by identity.

    Raises:
        RegistrationError: the optimizer steps shards, which differ between ranks.
        TypeError: ``optimizer`` is no optimizer.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"HookState.verify_equal(optimizer) takes one optimizer, got "
            f"{type(optimizer).__name__}; several are compared in a call each"
        )
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Shards are none of the model's parameters.
    known = all(id(parameter) in names for parameter in stepped)
    if not known or isinstance(optimizer, ZeroRedundancyOptimizer):
        raise RegistrationError(
            f"HookState.verify_equal(optimizer): {type(optimizer).__name__} steps something else "
            f"than this model's parameters, or each rank keeps a part of its state, which is not "
            f"equal on all ranks; leave it out"
        )
    values: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                values[f"{key!r} of the optimizer's group {number}"] = value
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in _nested(optimizer.state.get(parameter, {})):
                values[f"the optimizer's {key!r} of parameter {name!r}"] = value
    return values


def _nested(state: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _nested(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    """Describes values in words that are equal if all bits are equal."""
    tensors = {
        name: local_part(value) for name, value in values.items() if isinstance(value, Tensor)
    }
    # One by one, since ranks may have others; a GPU is waited for when all hashes are under way.
    numbers = [hashes_of([_bits(tensor)])[0] for tensor in tensors.values()]
    words = {name: _plain_words(value) for name, value in values.items()}
    for (name, tensor), number in zip(tensors.items(), numbers, strict=True):
        hashed = f"with the hash {int(number) % 2**64:016x}"
        words[name] = f"{tuple(tensor.shape)} of {tensor.dtype} {hashed}"
    return words


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.int_repr() if dense.is_quantized else dense


def _plain_words(value: object) -> str:
    """Formats numbers, texts and lists; names the class of others, whose text may differ."""
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain_words, value))})"
    return f"a value of {type(value).__qualname__}"


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's local tensor of a DTensor; other tensors as they are."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    part: Tensor = local.detach()
    return part
