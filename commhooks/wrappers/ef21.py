"""``EF21``: sends differences from what was sent before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commhooks.core.bucket import Bucket, Result, SchemeExchange
from commhooks.core.scheme import Scheme
from commhooks.core.slot import Slot
from commhooks.wrappers.feedback import Feedback

__all__ = ["EF21"]

_OWN = Slot("ef21.own", resize="mean")
_TOTAL = Slot("ef21.total")
_VELOCITY = Slot("ef21.velocity", resize="mean")


@dataclass(frozen=True)
class EF21(Feedback):
    """Sends how far each gradient is from what was sent of it before; ranks sum up what they get.

    ``G_i += C(g_i - G_i)``, and the mean over ranks of all G_i is what the optimizer gets. Needs a
    contraction (a biased scheme). Unlike a residual, G does not grow where gradients do. Keeps two
    tensors of the gradient's size; the mean lags behind the gradient by some steps.

    Args:
        scheme: what to send differences by.
        momentum: above 0, differences are of ``v_i = momentum v_i + (1 - momentum) g_i``, which
            stochastic gradients need; keeps a third tensor.

    Example:
        >>> hook = register(ddp_model, EF21(TopK(0.01), momentum=0.9))

    References: Richtarik, Sokolov and Fatkhullin, EF21, 2021; Fatkhullin, Tyurin and Richtarik,
    Momentum Provably Improves Error Feedback, 2023.
    """

    scheme: Scheme
    momentum: float = 0.0

    corrects = False

    @property
    def keeps(self) -> tuple[Slot, ...]:
        return (_OWN, _TOTAL, _VELOCITY) if self.momentum else (_OWN, _TOTAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"EF21(momentum=...): 0 <= momentum < 1, got {self.momentum!r}")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        target = bucket.gradient.to(bucket.wide_dtype)
        if self.momentum:
            target = torch.lerp(target, bucket.read(_VELOCITY), self.momentum)
            bucket.write(_VELOCITY, target)
        own = bucket.read(_OWN)
        difference = target - own
        inside = bucket.replace(
            raw=difference.clone(),
            residual=None,
            unsent=torch.empty_like(difference),
            output=torch.empty_like(difference),
        )
        result = inside.completed((yield from self.scheme.exchange(inside)))
        assert result.unsent is not None
        sent = difference - result.unsent if result.sent is None else result.sent
        bucket.write(_OWN, own + sent)
        total = bucket.read(_TOTAL) + result.mean
        bucket.write(_TOTAL, total)
        return Result(bucket.output.copy_(total), finite=result.finite)
