"""1-bit Adam's communication: dense gradients first, then momenta of one bit an entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commhooks._bucket import Bucket, Result, SchemeExchange
from commhooks._feedback import ErrorFeedback, residual_error
from commhooks._registry import register_scheme
from commhooks._scheme import Scheme
from commhooks._wrapper import need_own_keys
from commhooks.schemes.quantized import Blockwise
from ddp_core import AllReduce

__all__ = ["OneBitMomentum"]

_MOMENTUM = "onebit_adam.momentum"


@register_scheme("onebit_adam")
@dataclass(frozen=True)
class OneBitMomentum(Scheme):
    """Averages gradients until ``freeze_step``, and from then on momenta, in one bit with feedback.

    A bit of a gradient that Adam divides by its second moment loses too much; of the momentum it
    does not, once the second moment is frozen. ``commhooks.optim.OneBitAdam`` is the optimizer that
    knows which of the two it is given.

    Args:
        freeze_step: dense steps first, a tenth to a fifth of the training.
        beta1: of the momentum, as Adam's.
        block: entries per scale, a power of two, 32 to 2048.
        compressed: what momenta travel by; by default signs of blocks, with error feedback.

    Example:
        >>> hook = register(ddp_model, "onebit_adam", freeze_step=1000)
        >>> optimizer = commhooks.optim.OneBitAdam(ddp_model.parameters(), hook, lr=1e-3)

    Reference: Tang et al., 1-bit Adam, 2021.
    """

    freeze_step: int = 1000
    beta1: float = 0.9
    block: int = 2048
    compressed: Scheme | None = None

    stateful = True
    optimizes = True
    own_keys: ClassVar[tuple[str, ...]] = (_MOMENTUM,)
    starts_dense = "freeze_step"

    def __post_init__(self) -> None:
        if self.freeze_step < 1:
            raise ValueError(
                f"OneBitMomentum(freeze_step=...) is a number of steps, 1 or more, "
                f"got {self.freeze_step!r}"
            )
        if not 0 <= self.beta1 < 1:
            raise ValueError(f"OneBitMomentum(beta1=...): 0 <= beta1 < 1, got {self.beta1!r}")
        if self.compressed is None:
            object.__setattr__(self, "compressed", ErrorFeedback(Blockwise("sign", self.block)))
        if self._inner.optimizes or not self._inner.averages:
            raise ValueError(
                f"OneBitMomentum(compressed={type(self._inner).__name__}(...)): momenta are "
                f"averaged, and that scheme gives something else"
            )
        need_own_keys(self)

    @property
    def _inner(self) -> Scheme:
        assert self.compressed is not None
        return self.compressed

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return max(1, self._inner.rounds)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        memory, layout, dtype = bucket.memory, bucket.layout, bucket.wide_dtype
        old = bucket.read(_MOMENTUM)
        if bucket.step < self.freeze_step:
            mean = yield AllReduce(bucket.gradient)
            memory.write(_MOMENTUM, layout, torch.lerp(mean.to(dtype), old, self.beta1))
            return Result(mean)
        own = torch.lerp(bucket.gradient.to(dtype), old, self.beta1)
        inside = bucket.replace(raw=own, residual=None, unsent=None, output=torch.empty_like(own))
        result = yield from self._inner.exchange(inside)
        memory.write(_MOMENTUM, layout, result.mean.clone())
        return Result(bucket.output.copy_(result.mean), finite=result.finite)

    def initial_memory(self, name: str, shape: torch.Size, bucket: Bucket) -> dict[str, Tensor]:
        zeros = torch.zeros(shape, dtype=bucket.wide_dtype)
        return {**self._inner.initial_memory(name, shape, bucket), _MOMENTUM: zeros}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key == _MOMENTUM:
            return residual_error(value, parameter)
        return self._inner.memory_error(key, value, parameter)
