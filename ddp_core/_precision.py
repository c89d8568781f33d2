"""Mixed precision: low-precision parameters in forward and backward, full precision outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ddp_core._parameters import Trained

__all__ = ["MixedPrecision", "Precision"]


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
    nothing of it. Gradients that accumulate do so in full precision.

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
        self._earlier: dict[nn.Parameter, Tensor] = {}  # gradients accumulated so far
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)

    @property
    def is_low(self) -> bool:
        """Whether the parameters are low-precision now."""
        return bool(self._full)

    def lower(self) -> bool:
        """Before forward; False if it was done already."""
        if self.param_dtype is None or self.is_low:
            return False
        for parameter in self._trained:
            if parameter.grad is not None:
                self._earlier[parameter] = parameter.grad
                parameter.grad = None
        self._full = [parameter.data for parameter in self._casts]
        for parameter in self._casts:
            parameter.data = parameter.data.to(self.param_dtype)
        return True

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Of all passes since the last step, in full precision if there were several."""
        grad, earlier = parameter.grad, self._earlier.get(parameter)
        return grad if earlier is None else earlier if grad is None else earlier + grad

    def restore(self) -> None:
        """After backward, or after a forward without one: full precision, gradients too."""
        if not self.is_low:
            return
        low = {parameter: parameter.grad for parameter in self._trained}
        for parameter, data in zip(self._casts, self._full, strict=True):
            parameter.grad = None
            parameter.data = data
        self._full = []
        for parameter, grad in low.items():
            earlier = self._earlier.pop(parameter, None)
            if grad is None:
                parameter.grad = earlier
            elif earlier is None:
                parameter.grad = grad.to(parameter.dtype)
            else:
                parameter.grad = earlier.add_(grad)

    def cast_inputs(self, value: Any) -> Any:
        """Floating-point tensors anywhere in ``value``, in ``param_dtype``."""
        dtype = self.param_dtype
        if dtype is None:
            return value
        return tree_map(
            lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value
        )
