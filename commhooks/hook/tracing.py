"""Keeps ``torch.compile`` out of functions that have to run as Python each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ddp_core._torch import not_compiled

__all__ = ["not_traced"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(function: _Function) -> _Function:
    """Makes the compiler leave a function alone, with all that it calls: the graph breaks there."""
    decorated: Any = not_compiled(function, recursive=True)
    return decorated  # type: ignore[no-any-return]
