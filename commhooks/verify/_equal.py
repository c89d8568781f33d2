"""Finds the ranks whose averages, parameters or optimizer state differ from those of most ranks.

A tensor is hashed to an integer that depends on every bit and on every position, the same on every
device, so that ranks compare 8 bytes of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from commhooks.core._scheme import Scheme, walk
from commhooks.errors import RegistrationError, VerificationError
from commhooks.kernels import hash_parts
from ddp_core.exchange._errors import ranks_in_words

__all__ = [
    "check_equal",
    "describe_others",
    "hashes_of",
    "keeps_equal",
    "local_part",
    "minority_ranks",
    "state_of",
]

# Entries of small tensors that are hashed together: a copy of them stays in a CPU's cache, and in
# its heap; on a GPU launches are few.
_IN_CACHE, _ON_A_GPU = 2**17, 2**20


def keeps_equal(scheme: Scheme) -> bool:
    """Whether equal parameters stay equal, since all ranks get the same bits of every average."""
    # Of every part: a schedule with local steps has the traits of its other ones, too.
    return all(part.traits.agrees and part.traits.averages for part in walk(scheme))


# ---- hashes


def hashes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Hashes each tensor, of any dtype and strides, to an integer.

    They are on the first tensor's device that is not the CPU, if there is one: nobody waits for it.
    Every bit and every position counts; zero has two forms, which are equal.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
    hashed = [
        _hashes_of_a_kind([tensors[place].detach() for place in places])
        for places in kinds.values()
    ]
    if len(kinds) == 1:
        return hashed[0]
    devices = [tensor.device for tensor in tensors]
    device = next((each for each in devices if each.type != "cpu"), devices[0])
    together = torch.cat([part.to(device, non_blocking=True) for part in hashed])
    return together[_order(tuple(place for places in kinds.values() for place in places), device)]


@lru_cache(maxsize=64)
def _order(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the positions of ``0, 1, 2 ...`` among these."""
    # A copy from the host is over when it returns: any stream of a GPU may read what is kept.
    return torch.tensor(places, device="cpu").argsort().to(device)


def _hashes_of_a_kind(tensors: Sequence[Tensor]) -> Tensor:
    """Hashes tensors of one dtype on one device."""
    hashes = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    if tensors[0].is_complex():
        tensors = [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
    for begin, flat, sizes in _joined([tensor.reshape(-1) for tensor in tensors]):
        bits, zero = _bits_of(flat)
        hash_parts(bits, hashes[begin : begin + len(sizes)], sizes, zero=zero)
    return hashes


def _joined(flats: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, tuple[int, ...]]]:
    """Yields entries of some tensors from a place on, and how many each has among them."""
    waiting: list[Tensor] = []
    sizes: list[int] = []
    most = room = _IN_CACHE if flats[0].is_cpu else _ON_A_GPU
    for place, flat in enumerate(flats):
        if len(flat) >= most:  # by itself: it is not copied
            yield place, flat.contiguous(), (len(flat),)
            sizes.append(0)
            continue
        if len(flat) > room:
            yield place - len(sizes), torch.cat(waiting), tuple(sizes)
            waiting, sizes, room = [], [], most
        waiting.append(flat)
        sizes.append(len(flat))
        room -= len(flat)
    if waiting:
        yield len(flats) - len(sizes), torch.cat(waiting), tuple(sizes)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits_of(flat: Tensor) -> tuple[Tensor, int]:
    """Returns entries as integers, and the one that counts as zero."""
    integer = _INTEGERS[flat.element_size()]
    # -0 has the bits of the smallest integer; floats of 8 bits differ in that.
    inexact = flat.is_floating_point() and flat.element_size() > 1
    return flat.view(integer), torch.iinfo(integer).min if inexact else 0


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
    for name in dict.fromkeys(name for rank_values in everyone for name in rank_values):
        values = [rank_values.get(name, "nothing") for rank_values in everyone]
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
