"""Defines ``comm_hook``, the hook function of all schemes, and ``as_hook`` for other hooks.

No ``from __future__ import annotations`` here: DistributedDataParallel compares the annotations of
a hook with the classes themselves and refuses strings.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ddp_core._torch import AnyFuture

__all__ = ["as_hook", "comm_hook"]


def comm_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket by the scheme of ``state``, a :class:`commhooks.HookState`.

    Example:
        >>> ddp_model.register_comm_hook(HookState("bf16", ddp_model), comm_hook)

    Raises:
        TypeError: ``state`` is no HookState.
    """
    # Only the look-up is tried: an AttributeError of the exchange itself is another mistake.
    try:
        start = state.start
    except AttributeError:
        raise TypeError(
            f"comm_hook takes a commhooks.HookState as state, got {type(state).__name__}: "
            f"model.register_comm_hook(commhooks.HookState('int8', model), commhooks.comm_hook)"
        ) from None
    return start(bucket)  # type: ignore[no-any-return]


# A checkpoint may hold the hook next to its state. Pickles name a function by its module, so this
# name stays the same when the file moves, and ``torch.load(..., weights_only=True)`` takes it.
comm_hook.__module__ = "commhooks"
torch.serialization.add_safe_globals([comm_hook])


def as_hook(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps any callable in a plain function that DistributedDataParallel accepts as a hook.

    DDP refuses partials, objects with ``__call__``, a second parameter not named ``bucket``, and
    annotations that are strings.

    Args:
        function: is called as ``function(state, bucket)`` and returns a ``Future[Tensor]``.

    Raises:
        TypeError: ``function`` cannot be called with two positional arguments.

    Example:
        >>> ddp_model.register_comm_hook(None, as_hook(functools.partial(my_hook, ratio=0.1)))
    """
    if not callable(function):
        raise TypeError(f"as_hook(function) takes a callable, got {type(function).__name__}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"as_hook: {function!r} cannot be called as hook(state, bucket): {error}"
        ) from error
    except ValueError:  # a builtin without a signature: nothing to check
        pass
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = function(state, bucket)
        # The base class: futures that come from C++ are no ``torch.futures.Future``.
        if not isinstance(future, AnyFuture):
            raise TypeError(
                f"the communication hook {name} returns a torch.futures.Future[Tensor], "
                f"got {type(future).__name__}"
            )
        return future  # type: ignore[return-value]

    hook.__name__, hook.__qualname__ = name.rpartition(".")[2], name
    return hook
