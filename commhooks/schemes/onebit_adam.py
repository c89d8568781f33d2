"""Defines the scheme of 1-bit Adam: dense gradients first, then momenta of one bit per entry."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme, checked_result
from commhooks.core._slot import Slot
from commhooks.core._traits import Traits
from commhooks.schemes.quantized import Blockwise
from commhooks.wrappers._base import check_own_keys
from commhooks.wrappers._feedback import ErrorFeedback
from ddp_core import AllReduce

__all__ = ["OneBitMomentum"]

_MOMENTUM = Slot("onebit_adam.momentum")


@register_scheme("onebit_adam")
@dataclass(frozen=True)
class OneBitMomentum(Scheme):
    """Averages gradients until ``freeze_step``, then momenta, in one bit with feedback.

    Adam divides by its second moment, which signs of gradients do not preserve; signs of momenta
    converge once the second moment is frozen. ``commhooks.optim.OneBitAdam`` is the optimizer that
    knows in which steps it gets gradients and in which momenta.

    Args:
        freeze_step: number of uncompressed steps first, a tenth to a fifth of the training.
        beta1: decay of the momentum, as in Adam.
        block: entries per scale, a power of two, 32 to 2048.
        compressed: the scheme that averages momenta; by default signs of blocks, with error
            feedback.

    Example:
        >>> hook = register(ddp_model, "onebit_adam", freeze_step=1000)
        >>> optimizer = commhooks.optim.OneBitAdam(ddp_model.parameters(), hook, lr=1e-3)

    Reference: Tang et al., 1-bit Adam, 2021.
    """

    freeze_step: int = 1000
    beta1: float = 0.9
    block: int = 2048
    compressed: Scheme | None = None

    keeps = (_MOMENTUM,)

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
        if self._inner.traits.returns != "mean":
            raise ValueError(
                f"OneBitMomentum(compressed={type(self._inner).__name__}(...)): momenta are "
                f"averaged, and that scheme gives something else"
            )
        check_own_keys(self)

    @property
    def _inner(self) -> Scheme:
        assert self.compressed is not None
        return self.compressed

    @property
    def traits(self) -> Traits:
        inner = self._inner.traits
        return Traits(
            rounds=max(1, inner.rounds),
            returns="update",
            dense_warmup="freeze_step",
            max_bucket_numel=inner.max_bucket_numel,
        )

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        dtype = bucket.wide_dtype
        old = bucket.read(_MOMENTUM)
        if bucket.step < self.freeze_step:
            mean = yield AllReduce(bucket.gradient)
            bucket.write(_MOMENTUM, torch.lerp(mean.to(dtype), old, self.beta1))
            return Result(mean)
        momentum = torch.lerp(bucket.gradient.to(dtype), old, self.beta1)
        # An output of its own: momenta are float32, also where gradients are not.
        inside = bucket.replace(
            raw=momentum, residual=None, unsent=None, output=torch.empty_like(momentum)
        )
        result = checked_result(self._inner, (yield from self._inner.exchange(inside)))
        # The average replaces this rank's momentum, as in the paper: all ranks keep the same one.
        bucket.write(_MOMENTUM, result.mean.clone())
        return Result(bucket.output.copy_(result.mean), finite=result.finite)
