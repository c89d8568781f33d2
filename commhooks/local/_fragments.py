"""Defines ``Fragment``, a part of a model that DiLoCo exchanges at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Fragment", "Pending", "fragments_of"]

# Weight of a rank's own parameters where training continued while the average was under way. With
# 0, what the rank has learned meanwhile is lost, which with a long delay is nearly all; with 1,
# ranks drift apart. Streaming DiLoCo takes half.
_LOCAL_WEIGHT = 0.5
_CHUNK = 1 << 16  # entries per thread: those of five tensors are 1.3 MB


class Fragment:
    """Holds parameters that are exchanged together; has the methods of a bucket for hooks.

    Args:
        number: index among all fragments.
        names, parameters: parameters in order, of one dtype and device.
        place: index among the fragments that are exchanged in the same step.
        is_last: whether ``place`` is the last one.

    Attributes:
        outer: the parameters after the last exchange, equal on all ranks.
        momentum: momentum of the outer optimizer.
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
        # Kept, as DDP keeps its buckets: new memory for each exchange costs a page fault per page.
        self._outer_gradient = self.outer[0].new_empty(
            sum(parameter.numel() for parameter in parameters)
        )

    def compute_outer_gradient(self) -> None:
        """Writes the change of the parameters since the last exchange to the bucket's buffer."""
        # Old minus new, the sign of a gradient: an optimizer subtracts what it is given. Written in
        # place: pieces that are then concatenated would pass through memory twice.
        places = self._outer_gradient.split([parameter.numel() for parameter in self._parameters])
        for place, old, new in zip(places, self.outer, self._parameters, strict=True):
            torch.sub(old, new.detach(), out=place.view_as(old))

    def apply(
        self, mean: Tensor, lr: float, momentum: float, nesterov: bool, *, late: bool
    ) -> None:
        """Steps the outer optimizer with an averaged outer gradient.

        Args:
            mean: the average over ranks, flat.
            lr, momentum, nesterov: as of ``torch.optim.SGD``.
            late: whether training continued since the outer gradient was computed.
        """
        pieces = mean.split([parameter.numel() for parameter in self._parameters])
        parts = zip(self._parameters, self.outer, self.momentum, pieces, strict=True)
        for parameter, outer, velocity, piece in parts:
            # ``data``: an optimizer's change, which autograd does not record and which does not
            # invalidate tensors saved for a backward pass.
            whole = (parameter.data, outer, velocity, piece.view_as(outer))
            for values, old, speed, delta in _cache_chunks(whole):
                speed.mul_(momentum).add_(delta)
                step = delta.add(speed, alpha=momentum) if nesterov else speed
                old.sub_(step, alpha=lr)
                # ``outer`` stays without the local share, so that it is equal on all ranks.
                values.copy_(torch.lerp(old, values, _LOCAL_WEIGHT) if late else old)

    def restore(self) -> None:
        """Goes back to the parameters of the last exchange."""
        for parameter, outer in zip(self._parameters, self.outer, strict=True):
            parameter.data.copy_(outer)

    # ---- the methods of a bucket that a hook calls

    def index(self) -> int:
        return self._place

    def buffer(self) -> Tensor:
        return self._outer_gradient

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[Tensor]:
        return self._parameters


def _cache_chunks(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yields chunks of tensors of one shape that fit in the cache while several ops read them."""
    # A GPU would spend its time on launches, and chunks are views of contiguous tensors only.
    if tensors[0].device.type != "cpu" or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    numel = _CHUNK * torch.get_num_threads()
    yield from zip(*(tensor.view(-1).split(numel) for tensor in tensors), strict=True)


@dataclass
class Pending:
    """Holds an exchange whose average is not applied yet.

    Attributes:
        fragment: the fragment that was sent.
        future: future of the average.
        steps_left: inner steps until it is applied.
    """

    fragment: Fragment
    future: torch.futures.Future[Tensor]
    steps_left: int


def fragments_of(model: nn.Module, count: int) -> list[list[Fragment]]:
    """Splits the trained parameters into ``count`` parts, in order and of about equal size.

    Returns:
        For each part its fragments, one for each dtype and device. No part is empty.
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if len(trained) < count:
        raise ValueError(
            f"DiLoCo(fragments={count}): the model has {len(trained)} trained parameters"
        )
    cut = [name for name, parameter in trained if hasattr(parameter, "placements")]
    if cut:
        raise ValueError(
            f"DiLoCo(model, ...): {cut[0]} is a DTensor, of which each rank has a shard; with "
            f"tensor parallelism wrap the model in ddp_core.DistributedDataParallel and register "
            f'"noop" on it, which makes parameters of the shards'
        )
    whole = sum(parameter.numel() for _, parameter in trained)
    parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(count)]
    before = 0
    for index, (name, parameter) in enumerate(trained):
        remaining = len(trained) - index
        place = min(count - 1, before * count // max(1, whole))
        # No part stays empty: each later part needs one of the remaining parameters, and no part is
        # skipped because of one large parameter.
        filled = sum(bool(part) for part in parts)
        place = min(max(place, count - remaining), filled)
        parts[place].append((name, parameter))
        before += parameter.numel()
    groups, number = [], 0
    for part in parts:
        # A bucket is one flat tensor, so it has one dtype and one device.
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
        groups.append(group)
    return groups
