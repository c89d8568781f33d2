"""Caches results computed from a table, as long as nobody writes to the table.

Tables are int64 tensors on the CPU, which say where things lie: ops take them, since a schema of
torch.library has no type for the classes that make them. Reading one back takes longer than a small
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ._torch import version_of

__all__ = ["on_device", "once_per_table"]

P = ParamSpec("P")
T = TypeVar("T")
_MOST = 4096  # results of a function; a few per bucket are asked for in every step


def once_per_table(
    function: Callable[Concatenate[Tensor, P], T],
) -> Callable[Concatenate[Tensor, P], T]:
    """Decorates a function of a table and of other arguments, whose results are cached.

    The key is the tensor itself, and results are of one number of writes to it, by torch's own
    count. Errors are not kept.
    """
    # Not `lru_cache`, which hashes a tensor by a function in Python. An entry holds the tensor, so
    # that its id is not used again for another one.
    known: dict[tuple[Any, ...], tuple[int, T, Tensor]] = {}

    @wraps(function)
    def find(table: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            version = version_of(table)
        except RuntimeError:  # an inference tensor has no counter
            version = 0
        key = (id(table), *args)
        entry = known.get(key)
        if entry is not None and entry[0] == version:
            return entry[1]
        result = function(table, *args, **kwargs)
        if len(known) >= _MOST:
            known.clear()  # a bound on the tensors that it keeps alive
        known[key] = version, result, table
        return result

    return find


@once_per_table
def on_device(table: Tensor, device: torch.device) -> Tensor:
    """Returns the table on ``device``, copied once per table and device."""
    return table.to(device)
