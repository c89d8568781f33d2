"""Parameter names as in the model itself, whatever it is wrapped in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

__all__ = ["plain_name", "plain_names", "renamed"]

T = TypeVar("T")

# What torch.compile, activation checkpointing and FSDP put between a module and its parameters.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """``name`` without the parts that wrappers add; "module" is one only in front.

    Example:
        >>> plain_name("module._orig_mod.layers.0._checkpoint_wrapped_module.weight")
        'layers.0.weight'
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        del parts[0]
    return ".".join(parts) or name


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """The plain name of each; its own where two parameters have the same plain one."""
    plain = {name: plain_name(name) for name in names}
    times = Counter(plain.values())
    return {name: short if times[short] == 1 else name for name, short in plain.items()}


def renamed(values: Mapping[str, T], find: Callable[[str], str]) -> dict[str, T]:
    """``values`` by the names that ``find`` gives; as they were if two would get the same."""
    found = {find(name): value for name, value in values.items()}
    return found if len(found) == len(values) else dict(values)
