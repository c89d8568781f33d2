"""Defines DGC, which keeps the momentum itself, and ``DenseMomentum`` for dense parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot
from commhooks.core._traits import INT32_PLACES, Traits
from commhooks.kernels import add_momentum, scatter_sum, top_k, top_k_sampled
from commhooks.wrappers._per_parameter import PerParameter, Rule
from ddp_core import AllGather, AllReduce

__all__ = ["DGC", "DenseMomentum", "dgc"]

_MOMENTUM = Slot("dgc.momentum", resize="sum", dtype=torch.float32)
_UNSENT = Slot("dgc.unsent", resize="sum", dtype=torch.float32)
_AVERAGE = Slot("momentum")


def _check_momentum(owner: object, momentum: float) -> None:
    if not 0 <= momentum < 1:
        name = type(owner).__name__
        raise ValueError(f"{name}(momentum=...): 0 <= momentum < 1, got {momentum!r}")


@dataclass(frozen=True)
class DenseMomentum(Scheme):
    """Averages densely and returns the momentum of the average, for optimizers without momentum.

    Args:
        momentum: momentum, 0 <= momentum < 1.
        nesterov: Nesterov's momentum, as in ``torch.optim.SGD``.
    """

    momentum: float = 0.9
    nesterov: bool = False

    traits = Traits(returns="update")
    keeps = (_AVERAGE,)

    def __post_init__(self) -> None:
        _check_momentum(self, self.momentum)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        mean = yield AllReduce(bucket.gradient)
        old, output = bucket.read(_AVERAGE), bucket.output
        new = torch.empty_like(old)
        add_momentum(mean, old, self.momentum, new, None if self.nesterov else output)
        bucket.write(_AVERAGE, new)
        return Result(output.copy_(mean + self.momentum * new) if self.nesterov else output)


@dataclass(frozen=True)
class DGC(Scheme):
    """Sends the largest entries of accumulated momentum, and removes them from the momentum.

    On each rank ``u = momentum u + g; v = v + u``; the largest entries of v are sent, and set to
    zero in v and u (factor masking), so that stale momentum is not applied later. The result is the
    mean of the sent entries: use an optimizer without momentum. The share of sent entries starts at
    25 % and falls in geometric steps to ``ratio`` after ``warmup_steps``.

    Args:
        ratio: share of the entries that is sent.
        momentum: momentum of the optimizer that the scheme replaces.
        nesterov: Nesterov's momentum: ``u = momentum (u + g); v = v + u + g``.
        clip: threshold of gradient clipping per parameter: each of n ranks clips its gradient to
            the norm ``clip / sqrt(n)``. None: no clipping.
        warmup_steps: number of steps until ``ratio`` is reached.
        sampled: finds the threshold from a sample of the bucket.

    Example:
        >>> hook = register(ddp_model, "dgc", ratio=0.001, warmup_steps=400)

    Reference: Lin et al., Deep Gradient Compression, 2018.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None
    warmup_steps: int = 0
    sampled: bool = True

    traits = Traits(returns="update", max_bucket_numel=INT32_PLACES)
    keeps = (_MOMENTUM, _UNSENT)

    def __post_init__(self) -> None:
        _check_momentum(self, self.momentum)
        if not 0 < self.ratio <= 1:
            raise ValueError(f"DGC(ratio=...): 0 < ratio <= 1, got {self.ratio!r}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"DGC(clip=...) is a norm above 0, or None, got {self.clip!r}")
        if self.warmup_steps < 0:
            raise ValueError(
                f"DGC(warmup_steps=...) is a number of steps, got {self.warmup_steps!r}"
            )

    def ratio_at(self, step: int) -> float:
        """Returns the share of entries that is sent in a step: five levels during the warm-up."""
        if step >= self.warmup_steps:
            return self.ratio
        stage = _STAGES * step // self.warmup_steps
        return max(self.ratio, 0.25 * math.pow(self.ratio / 0.25, stage / _STAGES))

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        n = bucket.raw.numel()
        old_u, old_v = bucket.read(_MOMENTUM), bucket.read(_UNSENT)
        # The kernel knows float16 and bfloat16, and not float64.
        g = bucket.gradient.float() if bucket.raw.dtype == torch.float64 else bucket.gradient
        g = self._clipped(g, bucket)
        if self.nesterov:
            u, old_v = torch.add(old_u, g).mul_(self.momentum), old_v + g
        else:
            u = torch.empty_like(old_u)
            add_momentum(g, old_u, self.momentum, u)
        k = min(n, max(1, math.ceil(self.ratio_at(bucket.step) * n)))
        # An index and a value per entry from every rank: an all-reduce of all entries is no more.
        if 2 * k * bucket.world_size >= n:
            mean = yield AllReduce(old_v + u)
            bucket.write(_MOMENTUM, torch.zeros_like(u))
            bucket.write(_UNSENT, torch.zeros_like(u))
            return Result(bucket.output.copy_(mean))
        payload = u.new_empty(2, k, dtype=torch.int32)
        indices, values = payload[0], payload[1].view(torch.float32)
        unsent = torch.empty_like(u)
        select = top_k_sampled if self.sampled else top_k
        select(u, k, indices, values, residual=old_v, unsent=unsent, cleared=u)
        bucket.write(_UNSENT, unsent)
        bucket.write(_MOMENTUM, u)
        gathered = yield AllGather(payload)
        mean = bucket.output
        if mean.dtype == torch.float64:  # which the kernel does not know
            mean = torch.empty_like(u)
        indices, values = gathered[:, 0], gathered[:, 1].view(torch.float32)
        scatter_sum(indices, values, mean, factor=1.0 / bucket.world_size)
        return Result(mean if mean is bucket.output else bucket.output.copy_(mean))

    def _clipped(self, g: Tensor, bucket: Bucket) -> Tensor:
        if self.clip is None:
            return g
        # As in the paper: the sum of n independent gradients is sqrt(n) times as long as each.
        most = self.clip / math.sqrt(bucket.world_size)
        parts = g.split(bucket.layout.sizes)
        factors = [(most / (part.norm() + 1e-12)).clamp(max=1.0) for part in parts]
        return torch.cat([part * by for part, by in zip(parts, factors, strict=True)])


_STAGES = 5


@register_scheme("dgc")
def dgc(
    *,
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    clip: float | None = None,
    warmup_steps: int = 0,
    sampled: bool = True,
) -> Scheme:
    """Sends the largest entries of accumulated momentum, and averages vectors uncompressed.

    Deep Gradient Compression. The hook keeps the momentum: use an optimizer without.

    Args:
        ratio, momentum, nesterov, clip, warmup_steps, sampled: see :class:`commhooks.schemes.DGC`.
    """
    sparse = DGC(ratio, momentum, nesterov, clip, warmup_steps, sampled)
    return PerParameter([Rule(DenseMomentum(momentum, nesterov), max_dim=1)], default=sparse)
