"""Defines ``EF21``, which sends the difference between a gradient and its running estimate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._scheme import Scheme, checked_result
from commhooks.core._slot import Slot
from commhooks.core._traits import Traits
from commhooks.wrappers._feedback import Feedback

__all__ = ["EF21"]

# G_i of the paper, different on each rank.
_OWN = Slot("ef21.own", resize="mean", mean_key="ef21.total")
_TOTAL = Slot("ef21.total")  # the mean of G_i over ranks, the same on all
_VELOCITY = Slot("ef21.velocity", resize="mean")


@dataclass(frozen=True)
class EF21(Feedback):
    """Sends the difference between a gradient and its estimate; ranks add up the mean differences.

    ``G_i += C(g_i - G_i)`` is the estimate of rank i's gradient; the optimizer gets the mean of G_i
    over ranks. Needs a contraction (a biased scheme). Unlike a residual, which grows with the
    gradients, G_i is as large as a gradient. Keeps two tensors of the gradient's size; the mean
    lags behind the gradient by some steps.

    Args:
        scheme: the scheme that sends differences.
        momentum: above 0, differences are those of ``v_i = momentum v_i + (1 - momentum) g_i``,
            which stochastic gradients need; keeps a third tensor.

    Example:
        >>> hook = register(ddp_model, EF21(TopK(0.01), momentum=0.9))

    References: Richtarik, Sokolov and Fatkhullin, EF21, 2021; Fatkhullin, Tyurin and Richtarik,
    Momentum Provably Improves Error Feedback, 2023.
    """

    scheme: Scheme
    momentum: float = 0.0

    corrects = False  # the scheme inside gets differences, not gradients

    @property
    def keeps(self) -> tuple[Slot, ...]:
        return (_OWN, _TOTAL, _VELOCITY) if self.momentum else (_OWN, _TOTAL)

    @property
    def traits(self) -> Traits:
        # All ranks sum up the whole mean.
        return super().traits._replace(shards=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"EF21(momentum=...): 0 <= momentum < 1, got {self.momentum!r}")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        target = bucket.gradient.to(bucket.wide_dtype)
        if self.momentum:
            old = bucket.read(_VELOCITY)
            new = bucket.scratch(_VELOCITY, like=old)
            target = torch.lerp(target, old, self.momentum, out=new)
            bucket.write(_VELOCITY, target)
        estimate = bucket.read(_OWN)
        difference = target - estimate
        # An output of its own: ``bucket.output`` is to take the total, not the mean difference.
        inside = bucket.replace(
            raw=difference,  # not overwritten, since ``unsent`` and ``output`` are others
            residual=None,
            unsent=torch.empty_like(difference),
            output=torch.empty_like(difference),
        )
        result = checked_result(self.scheme, (yield from self.scheme.exchange(inside)))
        result = inside.with_unsent(result)
        assert result.unsent is not None
        sent = difference - result.unsent if result.sent is None else result.sent
        # The decoded difference: the mean of G_i over ranks is what ``total`` sums up.
        bucket.write(_OWN, torch.add(estimate, sent, out=bucket.scratch(_OWN, like=estimate)))
        old = bucket.read(_TOTAL)
        total = torch.add(old, result.mean, out=bucket.scratch(_TOTAL, like=old))
        bucket.write(_TOTAL, total)
        return Result(bucket.output.copy_(total), finite=result.finite)
