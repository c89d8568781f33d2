"""``EF21``: sends differences from what was sent before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from commhooks._bucket import Bucket, Result, SchemeExchange
from commhooks._feedback import Feedback, residual_error
from commhooks._scheme import Scheme

__all__ = ["EF21"]

_OWN, _TOTAL, _VELOCITY = "ef21.own", "ef21.total", "ef21.velocity"


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

    linear = False
    corrects = False
    per_rank: ClassVar[Mapping[str, str]] = {_OWN: "mean", _VELOCITY: "mean"}
    own_keys: ClassVar[tuple[str, ...]] = (_OWN, _TOTAL, _VELOCITY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"EF21(momentum=...): 0 <= momentum < 1, got {self.momentum!r}")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        memory, layout = bucket.memory, bucket.layout
        target = bucket.gradient.to(bucket.wide_dtype)
        if self.momentum:
            target = torch.lerp(target, bucket.read(_VELOCITY), self.momentum)
            memory.write(_VELOCITY, layout, target)
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
        memory.write(_OWN, layout, own + sent)
        total = bucket.read(_TOTAL) + result.mean
        memory.write(_TOTAL, layout, total)
        return Result(bucket.output.copy_(total), finite=result.finite)

    def _keys(self) -> tuple[str, ...]:
        return (_OWN, _TOTAL, *((_VELOCITY,) if self.momentum else ()))

    def initial_memory(self, name: str, shape: torch.Size, bucket: Bucket) -> dict[str, Tensor]:
        dtype = bucket.wide_dtype
        zeros = {key: torch.zeros(shape, dtype=dtype) for key in self._keys()}
        return {**self.scheme.initial_memory(name, shape, bucket), **zeros}

    def memory_error(self, key: str, value: Tensor, parameter: torch.Size) -> str | None:
        if key in self._keys():
            return residual_error(value, parameter)
        return self.scheme.memory_error(key, value, parameter)
