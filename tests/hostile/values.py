"""Puts into a state what does not belong there."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import commhooks

__all__ = ["Written", "changed", "changed_json", "damaged"]


@dataclass(frozen=True)
class Written(commhooks.schemes.Dense):
    """A user's class, which the program has not allowed to files."""


_DENSE = {"class": "commhooks.Dense", "settings": {}}


def _deep() -> Any:
    value: Any = _DENSE
    for _ in range(2000):
        value = {"class": "commhooks.DelayedStart", "settings": {"scheme": value, "steps": 1}}
    return value


# What JSON has, too.
_JSON: list[Any] = [
    *(None, True, False, 0, -1, -5, 1, 2, 2**31 - 1, 2**62, 2**63, 2**80, 10**30),
    *(0.5, 1e308, 1e-308, float("nan"), float("inf")),
    *("", "7", "rank0", "load", "int64", "x" * 100_000, "\ud800", "\x1b]0;owned\x07\x1b[31m"),
    *([], [[]], [["weight"], ["weight"]], [2**31, 2**31], [-30, -4], [10**9]),
    *([0, [[10**9], "float32"]], [0] * 10_000),
    *({}, {"": {}}, {"rank": 0, "memory": {}}),
    {"class": "commhooks.Traced", "settings": {"scheme": _DENSE, "folder": "found"}},
    {"class": f"{__name__}.Written", "settings": {}},
    {"class": "commhooks.PowerSGD", "settings": {"rank": 10**9}},
]
_DTYPES = (
    *(torch.complex64, torch.float16, torch.float64, torch.int64, torch.bool),
    torch.float8_e4m3fn,
)
# Tensors, and what is not to be copied deeply, are made anew.
_MADE: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (10**5000, b"\x00" * 9, (1, 2), (-5, 3), (0, 10**30))),
    lambda: {1: 2},
    *(_deep, lambda: [_deep()], object, lambda: int),
    *(lambda shape=shape: torch.zeros(shape) for shape in ((), 0, (3, 4))),
    lambda: torch.full((12,), torch.nan),
    lambda: torch.full((4,), -1.0),
    lambda: torch.full((4, 3), torch.inf),
    lambda: torch.zeros(4).to_sparse(),
    lambda: torch.eye(4).to_sparse_csr(),
    lambda: torch.zeros(4, device="meta"),
    *(lambda dtype=dtype: torch.zeros(4).to(dtype) for dtype in _DTYPES),
    lambda: torch.full((400,), 255, dtype=torch.uint8),
    lambda: torch.zeros(1).expand(10**12),
    lambda: torch.zeros(1).expand(4, 10**9),
    lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    lambda: torch.nn.Parameter(torch.zeros(4)),
    lambda: torch.zeros(4, 3).t(),
]
_PLAIN: list[Callable[[], Any]] = [partial(copy.deepcopy, value) for value in _JSON]
_VALUES = _PLAIN + _MADE


def changed(state: Any, rng: random.Random, values: Sequence[Callable[[], Any]] = _VALUES) -> Any:
    """A deep copy with one to three places replaced, renamed, left out or doubled."""
    state = copy.deepcopy(state)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(state))
        if not places:
            break
        holder, key = rng.choice(places)
        change = rng.randrange(5)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[rng.choice([f"{key}x", "rank1", "rank00", "rank9999999999", 5, None])] = holder[
                key
            ]
        elif change == 2 and isinstance(holder[key], torch.Tensor) and holder[key].numel():
            _damage(holder[key], rng)
        else:
            holder[key] = rng.choice(values)()
    return state


def changed_json(value: Any, rng: random.Random) -> str:
    """The text of a value that was changed as ``changed`` does, or of one nested deeply."""
    if rng.random() < 0.03:
        return "[" * 100_000 + "]" * 100_000
    return json.dumps(changed(value, rng, _PLAIN))


def _damage(value: torch.Tensor, rng: random.Random) -> None:
    """Changes some bytes, where it has bytes."""
    if value.layout != torch.strided or value.is_meta or not value.is_contiguous():
        return
    if type(value) is torch.Tensor:
        data = value.view(-1).view(torch.uint8)
        for _ in range(rng.choice((1, 4, 40))):
            data[rng.randrange(len(data))] = rng.choice((0, 127, 128, 255, rng.randrange(256)))


def _places(value: Any, inside: int = 0) -> Any:
    """Every (dict or list, key or position) in a nested value."""
    keys = value if isinstance(value, dict) else ()
    for key in list(range(len(value)) if isinstance(value, list) else keys)[:50]:
        yield value, key
        if inside < 20:
            yield from _places(value[key], inside + 1)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some changed, cut off, put in or put twice; or others altogether."""
    change = rng.randrange(8)
    changed = bytearray(data)
    place = rng.randrange(len(changed) + 1)
    if change == 0:
        return rng.randbytes(rng.choice((0, 1, 63, 64, 65, 500, 5000)))
    if change == 1:
        return bytes(changed[:place])
    if change == 2:
        return bytes(changed[:place] + rng.randbytes(rng.choice((1, 8, 100))) + changed[place:])
    if change == 3:
        return bytes(changed[:place] + changed[rng.randrange(len(changed)) :])
    for _ in range(rng.choice((1, 2, 8, 60))):
        if changed:
            place = rng.randrange(len(changed))
            if rng.random() < 0.3:  # a number of its own
                number = rng.choice((0, 1, 2**16, 2**27, 2**30, 2**31, 2**33, 2**63 - 1, 2**64 - 1))
                place &= ~7
                changed[place : place + 8] = number.to_bytes(8, "little")[: len(changed) - place]
            else:
                changed[place] = rng.randrange(256)
    return bytes(changed)
