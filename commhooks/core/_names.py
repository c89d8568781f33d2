"""Finds parameters' names in the model itself, without what wrappers add."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from commhooks._torch import WRAPPERS

__all__ = [
    "is_padding",
    "padding_name",
    "parameter_name",
    "piece_name",
    "plain_name",
    "plain_names",
    "renamed",
    "split_shard_name",
]

T = TypeVar("T")

_PIECE = re.compile(r"(.+)#(0|[1-9][0-9]{0,8})", re.DOTALL)


def plain_name(name: str) -> str:
    """Returns ``name`` without the parts that wrappers add; "module" counts only in front.

    Example:
        >>> plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    # DistributedDataParallel adds it in front. Further inside it may be a module of the user's.
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts) or name


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the plain name of each name, or the name itself if two plain names are equal."""
    # Memory is keyed by these names: two parameters of one name would share a residual.
    plain = {name: plain_name(name) for name in names}
    times = Counter(plain.values())
    return {name: short if times[short] == 1 else name for name, short in plain.items()}


def piece_name(name: str, rank: int) -> str:
    """Returns the name of a rank's shard of a parameter, on hosts such as FSDP2."""
    return f"{name}#{rank}"


def split_shard_name(name: str) -> tuple[str, int | None]:
    """Splits the name of a shard into parameter and rank; any other name has the rank None.

    Example:
        >>> split_shard_name("layer.weight#3")
        ('layer.weight', 3)
    """
    match = _PIECE.fullmatch(name)
    return (name, None) if match is None else (match[1], int(match[2]))


def padding_name(name: str) -> str:
    """Returns the name of the padding behind the last shard of a parameter."""
    return f"{name}#padding"


def is_padding(name: str) -> bool:
    """Whether a name is that of padding, see :func:`padding_name`."""
    return name.endswith("#padding")


def parameter_name(name: str) -> str:
    """Returns the parameter's name, given that name or the name of a shard of the parameter."""
    return name.partition("#")[0]


def renamed(values: Mapping[str, T], find: Callable[[str], str]) -> dict[str, T]:
    """Renames ``values`` by ``find``, or returns them as they are if two names would be equal."""
    by_new_name = {find(name): value for name, value in values.items()}
    return by_new_name if len(by_new_name) == len(values) else dict(values)
