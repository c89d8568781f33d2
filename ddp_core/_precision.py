"""Mixed precision: low-precision parameters in forward and backward, full precision outside."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ddp_core._accumulators import NO_BACKWARD, backward_number
from ddp_core._parameters import Trained

__all__ = ["MixedPrecision", "Precision", "Use"]


@dataclasses.dataclass
class MixedPrecision:
    """Settings, with the fields of torch's; None leaves a dtype as it is.

    Attributes:
        param_dtype: of parameters and inputs, and so of forward and backward.
        reduce_dtype: of gradients while they are averaged; ``param_dtype`` by default.
        buffer_dtype: of buffers, for good.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class Precision:
    """Exchanges the parameters' data for a low-precision copy, and back.

    Between steps parameters and gradients have their own dtype, so optimizers and checkpoints see
    nothing of it. A gradient that is there already stays as it is: autograd adds the low-precision
    ones to it in its own dtype.

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
        self._trained = [one.parameter for one in trained]
        self._casts = [
            parameter
            for name, parameter in module.named_parameters()
            if name not in ignored and parameter.is_floating_point()
        ]
        self._full: list[Tensor] = []  # the parameters' own data while they are low
        self._users: set[int] = set()  # forward passes, and graphs that backward may come to
        self._kept: list[Use] = []  # of forward passes whose graphs are not known
        self._numbers = itertools.count()
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    @property
    def is_low(self) -> bool:
        """Whether the parameters are low-precision now."""
        return bool(self._full)

    # ---- forward

    def begin_forward(self) -> tuple[Use, bool]:
        """Makes the parameters low-precision.

        Returns:
            What ends this forward pass, and whether the parameters had full precision before.
        """
        changes = self.param_dtype is not None and not self.is_low
        if changes:
            self._full = [parameter.data for parameter in self._casts]
            for parameter in self._casts:
                parameter.data = parameter.data.to(self.param_dtype)
        number = next(self._numbers)
        self._users.add(number)
        return Use(self, number), changes

    def end_forward(self, use: Use, output: Any) -> None:
        """Keeps the parameters low until backward, or until the output's graph is dropped."""
        leaves = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        graphs: list[Any] = [one.grad_fn for one in leaves if one.grad_fn is not None]
        for graph in graphs:
            graph.metadata[use] = use
        if graphs:
            return
        if torch.is_grad_enabled() and not leaves:  # an object of the user's may hold a graph
            self._kept.append(use)
        else:
            use.end()

    def _user_gone(self, number: int) -> None:
        self._users.discard(number)
        if not self._users and backward_number() == NO_BACKWARD:
            self.restore()

    # ---- backward

    def restore(self) -> None:
        """After backward, or a forward pass that no backward pass follows: full precision."""
        self._users.clear()
        self._kept.clear()
        if not self._full:
            return
        grads = [parameter.grad for parameter in self._trained]
        for parameter, data in zip(self._casts, self._full, strict=True):
            parameter.grad = None
            parameter.data = data
        self._full = []
        for parameter, grad in zip(self._trained, grads, strict=True):
            parameter.grad = None if grad is None else grad.to(parameter.dtype)

    def cast_inputs(self, value: Any) -> Any:
        """Floating-point tensors anywhere in ``value``, in ``param_dtype``."""
        dtype = self.param_dtype
        if dtype is None:
            return value
        return tree_map(
            lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value
        )


class Use:
    """Somebody who needs low-precision parameters, until ``end`` is called or this is dropped."""

    def __init__(self, precision: Precision, number: int) -> None:
        self._precision, self._number = weakref.ref(precision), number

    def end(self) -> None:
        """Restores full precision if nobody else needs the low one."""
        precision = self._precision()
        if precision is not None:
            precision._user_gone(self._number)

    def __del__(self) -> None:
        self.end()
