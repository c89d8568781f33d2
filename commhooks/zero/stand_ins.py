"""Defines what stands in ``.grad`` where the mean lies in shards, and who has dropped it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from commhooks._torch import made_subclass, without_overrides
from commhooks.errors import RegistrationError

__all__ = ["InShards", "StandIns"]


_CONVERSIONS: tuple[Any, ...] = (Tensor.to, Tensor.type, Tensor.cuda, Tensor.cpu)
_CONVERSIONS += (Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16)


class InShards(Tensor):
    """Stands in ``.grad`` of a parameter, the mean of whose gradient lies in shards.

    Whoever reads it, such as ``torch.nn.utils.clip_grad_norm_``, gets an error instead of the
    gradient of this rank alone. Whoever drops it drops the mean.
    """

    def __new__(cls, parameter: Tensor) -> InShards:
        # One entry of memory for all.
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        made: InShards = made_subclass(cls, nothing.expand(parameter.shape))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What ``Module.to`` asks before it converts.
        if func in (Tensor.is_floating_point, Tensor.is_complex):
            with without_overrides():
                return func(*args)
        if func in _CONVERSIONS:
            raise RegistrationError(
                f"a model whose gradients lie in shards (ZeroOptimizer) is converted to another "
                f"dtype or device (.{func.__name__}): convert the module before it is wrapped, or "
                f"wrap it again and make another ZeroOptimizer"
            )
        raise RegistrationError(
            "the mean of this gradient lies in shards on the ranks (ZeroOptimizer), and .grad has "
            "none: use ZeroOptimizer.clip_grad_norm_, or the gradients in its param_groups"
        )


class StandIns:
    """Puts stand-ins in ``.grad``, and away again where gradients are to come."""

    def __init__(self) -> None:
        self._away: set[nn.Parameter] = set()

    def put(self, parameters: Iterable[nn.Parameter], left_alone: Collection[nn.Parameter]) -> None:
        """Lets parameters whose mean has arrived have one."""
        for parameter in parameters:
            if parameter not in left_alone:
                parameter.grad = InShards(parameter)
                self._away.discard(parameter)

    def make_room(self, parameters: Iterable[nn.Parameter]) -> None:
        """Empties ``.grad`` for another backward pass, without dropping the means."""
        for parameter in parameters:
            if type(parameter.grad) is InShards:
                parameter.grad = None
                self._away.add(parameter)

    def stand(self, parameter: nn.Parameter) -> bool:
        """Whether nobody has dropped the stand-in of a parameter."""
        return type(parameter.grad) is InShards or parameter in self._away

    def forget(self) -> None:
        """Begins anew: all means were dropped."""
        self._away.clear()
