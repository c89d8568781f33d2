"""Trains modules whose parameters are DTensors (tensor parallelism) by their local shards.

Each rank averages its shards with those of the same place in other replicas. While the module runs
forward it has DTensors, made of the shards; otherwise it has the shards, which are its parameters.
torch's own transform loses the parameters in the first forward pass: its second hook looks for
DTensors among parameters, but those that its first hook has put there are none.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ddp_core._torch import dtensor_spec_of, local_spec_of

__all__ = ["dtensor_spec", "localize"]


# Torch's own name for it, ``_st_info``, would make its transform take our shards for its own.
_SPEC = "_dtensor_spec"


def dtensor_spec(parameter: Tensor) -> Any:
    """Returns mesh and placements of the DTensor that a local shard is of; None for others.

    Also of the shards that torch's DistributedDataParallel has made.
    """
    return getattr(parameter, _SPEC, None) or local_spec_of(parameter)


@dataclass(frozen=True, eq=False)
class _Place:
    """Describes where a module has a parameter, and of which DTensor that is the local shard."""

    owner: nn.Module
    name: str
    local: nn.Parameter
    spec: Any

    def distributed(self) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            self.local,
            self.spec.mesh,
            self.spec.placements,
            run_check=False,  # a collective; the shards are those that the DTensor had
            shape=self.spec.shape,
            stride=self.spec.stride,
        )


class _Distributed:
    """Gives modules their DTensors before forward, and takes them back afterwards."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places
        self._given: list[_Place] = []

    def before(self, module: nn.Module, inputs: Any) -> None:
        for place in self._places:
            if place.name not in vars(place.owner):
                # Found before parameters are, which stay where they are: their order and their
                # names do not change.
                vars(place.owner)[place.name] = place.distributed()
                self._given.append(place)

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        given, self._given = self._given, []
        for place in given:
            vars(place.owner).pop(place.name, None)


def localize(module: nn.Module) -> None:
    """Replaces DTensor parameters by their local shards; nothing if there are none.

    A parameter that several modules share stays one.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    locals_of: dict[int, nn.Parameter] = {}
    places = []
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in locals_of:
                local = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
                setattr(local, _SPEC, dtensor_spec_of(parameter))
                locals_of[id(parameter)] = local
            local = locals_of[id(parameter)]
            places.append(_Place(owner, name, local, dtensor_spec_of(parameter)))
    if not places:
        return
    for place in places:
        place.owner.register_parameter(place.name, place.local)
    # The whole module for what others than their owners use, and each owner for itself: activation
    # checkpointing calls it again in backward.
    owners = dict.fromkeys(place.owner for place in places)
    parts = {owner: [place for place in places if place.owner is owner] for owner in owners}
    for called, its in {**parts, module: places}.items():
        hooks = _Distributed(its)
        called.register_forward_pre_hook(hooks.before)
        # Also after a forward pass that raised: the next one would find old DTensors otherwise.
        called.register_forward_hook(hooks.after, always_call=True)
