"""Watches autograd's gradient accumulators, and finds those that a backward pass will not reach."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ddp_core._torch import backward_number, call_at_end, current_node, will_run

__all__ = [
    "NO_BACKWARD",
    "Accumulators",
    "accumulator_of",
    "backward_number",
    "call_after_backward",
    "is_nested",
    "when_accumulated",
]


NO_BACKWARD = -1


class _Listener(Protocol):
    def arrived(self, index: int) -> None: ...
    def arrived_in_full_precision(self, index: int) -> None: ...


class Accumulators:
    """Watches the nodes that write the parameters' gradients.

    Args:
        listener: its ``arrived(index)`` is called on autograd's thread when parameter ``index``
            has its gradient, or when the gradient turned out to be undefined. Held weakly.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], listener: _Listener) -> None:
        self._parameters = list(parameters)
        self._listener = weakref.ref(listener)
        # Autograd has a thread per device.
        several = len({parameter.device for parameter in parameters}) > 1
        self._lock = threading.RLock() if several else None
        self._nodes: list[Any] = []  # a parameter does not keep its node alive
        self._handles: list[Any] = []
        self._other_handles: list[Any] = []
        self.watch()

    def watch(self) -> None:
        """Registers a hook on every node; again, where parameters have new nodes."""
        self.unwatch()
        for index, parameter in enumerate(self._parameters):
            node = accumulator_of(parameter)
            self._nodes.append(node)
            self._handles.append(node.register_hook(_hook(self._listener, index, self._lock)))

    def unwatch(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def watch_other_nodes(self) -> None:
        """Notifies the listener, from now on, of gradients that another node has written.

        A parameter has another node if its data had another dtype when it was used.
        """
        reference = weakref.ref(self)

        def look(index: int, _: object) -> None:
            here, node = reference(), current_node()
            listener = None if here is None else here._listener()
            if here is not None and listener is not None and node is not here._nodes[index]:
                listener.arrived_in_full_precision(index)

        for index, parameter in enumerate(self._parameters):
            self._other_handles.append(when_accumulated(parameter, partial(look, index)))

    def close(self) -> None:
        """Removes all hooks for good: each would cost a call in every backward pass."""
        self.unwatch()
        for handle in self._other_handles:
            handle.remove()

    def out_of_reach(self) -> list[int]:
        """Returns the parameters that the backward pass under way will not reach."""
        return [index for index, node in enumerate(self._nodes) if not will_run(node)]


def accumulator_of(parameter: Tensor) -> Any:
    """Returns the node that accumulates a parameter's gradient, which the caller keeps alive."""
    trains = parameter.requires_grad
    if not trains:
        parameter.requires_grad_(True)  # one that is frozen for now has no node else
    with torch.enable_grad():
        alias = parameter.view_as(parameter)
    if not trains:
        parameter.requires_grad_(False)
    assert alias.grad_fn is not None
    return alias.grad_fn.next_functions[0][0]


def when_accumulated(parameter: Tensor, function: Callable[[Tensor], None]) -> Any:
    """Calls a function with a parameter, frozen or not, after each gradient; returns a handle.

    Unlike a hook of its node, the function stays when the parameter gets another node.
    """
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # else it takes no hook
    handle = parameter.register_post_accumulate_grad_hook(function)
    parameter.requires_grad_(trains)
    return handle


def call_after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward pass under way has succeeded, and not if it raises.

    Within a reentrant backward pass, the function is called when the inner pass has succeeded.
    """
    call_at_end(function)


def is_nested() -> bool:
    """Whether, at the end of backward, the pass was a reentrant one within another."""
    return current_node() is not None


def _hook(
    listener: weakref.ref[_Listener], index: int, lock: Any
) -> Callable[[object, object], None]:
    # Nodes are invisible to the garbage collector: what they hold strongly is never freed while
    # they live.
    def hook(_inputs: object, _outputs: object) -> None:
        me = listener()
        if me is not None:
            me.arrived(index)

    def locked(inputs: object, outputs: object) -> None:
        with lock:
            hook(inputs, outputs)

    return hook if lock is None else locked
