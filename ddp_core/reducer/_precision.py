"""Exchanges parameters for low-precision copies in forward and backward (mixed precision)."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core._torch import keeps_graph, tree_leaves, tree_map, version_of
from ddp_core.reducer._autograd import (
    NO_BACKWARD,
    backward_number,
    call_after_backward,
    is_nested,
)
from ddp_core.reducer._parameters import Trained

__all__ = ["MixedPrecision", "Precision", "Use"]

_PLAIN = (Tensor, bool, int, float, str, type(None))  # what holds no graph but its own


@dataclasses.dataclass
class MixedPrecision:
    """Holds the dtypes of mixed precision, with torch's fields; None leaves a dtype unchanged.

    Attributes:
        param_dtype: of parameters and inputs, and so of forward and backward.
        reduce_dtype: of gradients while they are averaged; ``param_dtype`` by default.
        buffer_dtype: of buffers, for good.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class Precision:
    """Replaces the parameters' data by a low-precision copy, and restores it.

    Between steps parameters and gradients have their own dtype, so optimizers and checkpoints are
    not affected. An accumulated gradient keeps its dtype: autograd adds low-precision gradients to
    it in that dtype.

    Args:
        config: torch's ``_MixedPrecision`` or :class:`MixedPrecision`.
        ignored: names of parameters and buffers that stay as they are.
    """

    def __init__(
        self,
        config: Any,
        module: nn.Module,
        trained: list[Trained],
        ignored: Collection[str],
    ) -> None:
        self.param_dtype: torch.dtype | None = config.param_dtype
        self._trained = [entry.parameter for entry in trained]
        self._casts = [
            parameter
            for name, parameter in module.named_parameters()
            if name not in ignored and parameter.is_floating_point()
        ]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._full: list[Tensor] = []  # the parameters' own data while they are low
        self._versions: list[int] = []  # of the low copies
        self._changed = ""  # a parameter whose low copy was written to
        self._users: set[int] = set()  # forward passes, and graphs that backward may come to
        self._graphless: list[Use] = []  # of forward passes whose graphs are not known
        self._numbers = itertools.count()
        self.is_watched = False  # the low-precision parameters' accumulators
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    @property
    def is_low(self) -> bool:
        """Whether the parameters are low-precision now."""
        return bool(self._full)

    def full_values(self) -> dict[int, Tensor]:
        """Returns the parameters' full-precision data while the copies are in use, by identity."""
        return {id(cast): data for cast, data in zip(self._casts, self._full, strict=False)}

    # ---- forward

    def begin_forward(self) -> Use:
        """Makes the parameters low-precision; returns an object that ends this forward pass.

        Raises:
            RuntimeError: the low-precision copies were written to in the last pass.
        """
        if self._changed:
            name, self._changed = self._changed, ""
            raise RuntimeError(
                f"the parameter {name} was changed in place while it was a low-precision copy, "
                f"between a forward pass and the end of its backward pass: the change is lost. "
                f"With mixed_precision, call optimizer.step() before the next forward pass"
            )
        number = next(self._numbers)
        self._users.add(number)  # before anything else: a garbage collection may restore
        if self.param_dtype is not None and not self.is_low:
            self.is_watched = False
            full = [parameter.data for parameter in self._casts]
            with torch.inference_mode(mode=False):  # else they could not be trained afterwards
                low = [data.to(self.param_dtype) for data in full]
            for parameter, data in zip(self._casts, low, strict=True):
                parameter.data = data
            self._full, self._versions = full, list(map(version_of, self._casts))
        return Use(self, number)

    def end_forward(self, use: Use, output: Any) -> None:
        """Keeps the parameters low until backward, or until the output's graph is dropped."""
        leaves = tree_leaves(output)
        graphs: list[Any] = [
            leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        for graph in graphs:
            graph.register_prehook(use.backward_begins)  # and lives as long as the graph
        if graphs:
            return
        if torch.is_grad_enabled() and not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            self._graphless.append(use)  # an object of the user's may hold a graph
        else:
            use.end()

    def _user_gone(self, number: int, *, after_backward: bool) -> None:
        if number not in self._users:
            return
        self._users.discard(number)
        if self._users:
            return
        if not is_nested() if after_backward else backward_number() == NO_BACKWARD:
            self.restore()

    # ---- backward

    def restore(self) -> None:
        """Restores full precision, after backward or a forward pass without one."""
        self._users.clear()
        self._graphless.clear()
        full, self._full = self._full, []
        grads = [parameter.grad for parameter in self._trained]
        if full:
            for parameter, data, version in zip(self._casts, full, self._versions, strict=True):
                if version_of(parameter) != version:
                    self._changed = self._names[id(parameter)]
                parameter.grad = None
                parameter.data = data
        # A pass over a graph that was kept leaves low-precision gradients also later.
        for parameter, grad in zip(self._trained, grads, strict=True):
            if grad is not None and (full or grad.dtype != parameter.dtype):
                parameter.grad = None
                parameter.grad = grad.to(parameter.dtype)

    def cast_inputs(self, value: Any) -> Any:
        """Returns ``value`` with all floating-point tensors in it cast to ``param_dtype``."""
        dtype = self.param_dtype
        if dtype is None:
            return value
        return tree_map(
            lambda leaf: (
                leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            ),
            value,
        )


class Use:
    """Keeps parameters low-precision until the last reference to this object is dropped."""

    def __init__(self, precision: Precision, number: int) -> None:
        self._precision, self._number = weakref.ref(precision), number

    def backward_begins(self, _: object) -> None:
        """Ends the use with this backward pass, unless its graph is kept for another one."""
        if not keeps_graph():
            call_after_backward(partial(self.end, after_backward=True))

    def end(self, *, after_backward: bool = False) -> None:
        """Restores full precision if no other pass needs the low-precision copies."""
        precision = self._precision()
        if precision is not None:
            precision._user_gone(self._number, after_backward=after_backward)

    def __del__(self) -> None:
        self.end()
