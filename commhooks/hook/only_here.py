"""Defines ``OnlyHere``, a hook of a module that stays behind when the module is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from commhooks.hook.tracing import not_traced

__all__ = ["OnlyHere"]


class OnlyHere:
    """Calls a function where a module calls its hooks, and not for its copies.

    A module that is copied or pickled takes its hooks along (``copy.deepcopy(model)`` makes
    averages of weights). The function is for the first module only.

    Args:
        call: gets module and inputs, as forward pre-hooks do, or module and keys, as hooks of
            ``load_state_dict``; None: this is of a copy.
    """

    def __init__(self, call: Callable[[nn.Module, Any], None] | None) -> None:
        self._call = call

    # Not traced by torch.compile: it acts on state that changes from step to step.
    @not_traced
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._call is not None:
            self._call(module, inputs)

    def __reduce__(self) -> tuple[type[OnlyHere], tuple[None]]:
        return OnlyHere, (None,)
