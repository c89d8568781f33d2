"""The parts of a model that DiLoCo exchanges one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Fragment", "Pending", "fragments_of"]


class Fragment:
    """Parameters that are exchanged together; to a hook it is a bucket of a step.

    Args:
        number: among all fragments.
        place, is_last: among those that are exchanged in one step, one for each dtype and device.
    """

    def __init__(
        self,
        number: int,
        names: list[str],
        parameters: list[Tensor],
        *,
        place: int,
        is_last: bool,
    ) -> None:
        self.number, self.names, self._parameters = number, names, parameters
        self._place, self._is_last = place, is_last
        self.outer = [parameter.detach().clone() for parameter in parameters]
        self.momentum = [torch.zeros_like(parameter) for parameter in parameters]
        self._delta = torch.empty(0)

    def measure(self) -> None:
        """Takes down how far the parameters went since the last exchange."""
        pairs = zip(self.outer, self._parameters, strict=True)
        self._delta = torch.cat([(old - new.detach()).flatten() for old, new in pairs])

    def apply(self, mean: Tensor, lr: float, momentum: float, nesterov: bool, mix: float) -> None:
        """One outer step; ``mix`` is the share of the local parameters that stays."""
        pieces = mean.split([parameter.numel() for parameter in self._parameters])
        parts = zip(self._parameters, self.outer, self.momentum, pieces, strict=True)
        for parameter, outer, velocity, piece in parts:
            delta = piece.view_as(outer)
            velocity.mul_(momentum).add_(delta)
            step = delta.add(velocity, alpha=momentum) if nesterov else velocity
            outer.sub_(step, alpha=lr)
            parameter.data.copy_(torch.lerp(outer, parameter.data, mix) if mix else outer)

    def restore(self) -> None:
        """Goes back to the parameters of the last exchange."""
        for parameter, outer in zip(self._parameters, self.outer, strict=True):
            parameter.data.copy_(outer)

    # As a hook sees it.

    def index(self) -> int:
        return self._place

    def buffer(self) -> Tensor:
        return self._delta

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[Tensor]:
        return self._parameters


@dataclass
class Pending:
    """An exchange under way, or arrived and not yet applied."""

    fragment: Fragment
    future: torch.futures.Future[Tensor]
    steps_left: int


def fragments_of(model: nn.Module, count: int) -> list[list[Fragment]]:
    """``count`` parts of about equal size, in order; each one fragment per dtype and device."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if len(trained) < count:
        raise ValueError(
            f"DiLoCo(fragments={count}): the model has {len(trained)} trained parameters"
        )
    whole = sum(parameter.numel() for _, parameter in trained)
    parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
    before = 0
    for index, (name, parameter) in enumerate(trained):
        left = len(trained) - index
        place = min(count - 1, before * count // max(1, whole))
        filled = sum(bool(part) for part in parts)
        place = max(place, count - left) if filled <= place else place  # none stays empty
        place = min(place, filled)
        parts[place].append((name, parameter))
        before += parameter.numel()
    found, number = [], 0
    for part in parts:
        kinds: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, parameter in part:
            kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        group = []
        for place, members in enumerate(kinds.values()):
            names, parameters = zip(*members, strict=True)
            is_last = place == len(kinds) - 1
            group.append(
                Fragment(number, list(names), list(parameters), place=place, is_last=is_last)
            )
            number += 1
        found.append(group)
    return found
