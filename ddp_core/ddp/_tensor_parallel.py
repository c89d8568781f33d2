"""Trains modules whose parameters are DTensors (tensor parallelism) by their local shards.

Each rank averages its shards with those of the same place in other replicas. While the module runs
forward it has DTensors, made of the shards; otherwise it has the shards, which are its parameters.
torch's own transform loses the parameters in the first forward pass: its second hook looks for
DTensors among parameters, but those that its first hook has put there are none.

What is saved, of the module and of its optimizers, are DTensors: a checkpoint keeps one of several
plain tensors of one name, since it takes them for copies.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_core._torch import dtensor_spec_of, local_shape, local_spec_of
from ddp_core.reducer._optimizer import before_every_step

__all__ = ["dtensor_spec", "localize"]


# Torch's own name for it, ``_st_info``, would make its transform take our shards for its own.
_SPEC = "_dtensor_spec"


def dtensor_spec(parameter: Tensor) -> Any:
    """Returns the mesh and placements of a local shard's DTensor; None for other tensors.

    This includes shards that torch's DistributedDataParallel has made.
    """
    return getattr(parameter, _SPEC, None) or local_spec_of(parameter)


@dataclass(frozen=True, eq=False)
class _Place:
    """Describes a parameter of a module, and the DTensor of which it is the local shard."""

    owner: nn.Module
    name: str
    spec: Any

    def distributed(self) -> Any:
        # Not a parameter that is kept here: ``load_state_dict(assign=True)`` puts in another.
        return _distributed(self.owner._parameters[self.name], self.spec)


def _distributed(local: Any, spec: Any) -> Any:
    """Returns the DTensor of a shard, which shares its memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local if torch.is_grad_enabled() else local.detach(),
        spec.mesh,
        spec.placements,
        run_check=False,  # a collective; the shards are those that the DTensor had
        shape=spec.shape,
        stride=spec.stride,
    )


def _shard_of(value: Tensor, shape: torch.Size, spec: Any) -> Tensor:
    """Returns this rank's shard of a DTensor or of a whole tensor; other tensors unchanged.

    Args:
        shape: the shape of the shard.

    Raises:
        ValueError: the DTensor is on another mesh.
    """
    from torch.distributed.tensor import DTensor

    value = value.detach()
    if not isinstance(value, DTensor):
        if value.shape == shape or value.shape != spec.shape:
            return value
        # Not ``distribute_tensor``, which does not know the shards of several mesh dimensions.
        sizes, begins = local_shape(spec)
        for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
            value = value.narrow(dim, min(begin, value.shape[dim]), size)
        return value
    if value.device_mesh != spec.mesh:
        raise ValueError(
            f"a DTensor on {value.device_mesh}, and the model is on {spec.mesh}: load it with "
            f"torch.distributed.checkpoint into what state_dict() returns here"
        )
    if value.placements != spec.placements:
        value = value.redistribute(placements=spec.placements)
    shard: Tensor = value.to_local()
    return shard


class _Distributed:
    """Installs DTensors in modules before forward, and the shards again afterwards."""

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


def _save(places: Sequence[_Place], module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    """Replaces shards in a state by DTensors."""
    for place in places:
        local = state.get(prefix + place.name)
        if isinstance(local, Tensor):
            state[prefix + place.name] = _distributed(local, place.spec)


def _load(places: Sequence[_Place], module: nn.Module, state: Any, prefix: str, *more: Any) -> None:
    """Replaces DTensors by this rank's shards in a state that is being loaded."""
    errors: list[str] = more[-1]
    for place in places:
        key, parameter = prefix + place.name, place.owner._parameters[place.name]
        value = state.get(key)
        if isinstance(value, Tensor) and parameter is not None:
            try:
                state[key] = _shard_of(value, parameter.shape, place.spec)
            except ValueError as error:
                errors.append(f"{key!r} is {error}")


def localize(module: nn.Module) -> None:
    """Replaces DTensor parameters by their local shards; does nothing if there are none.

    A parameter that several modules share stays shared.
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
            owner._parameters[name] = locals_of[id(parameter)]
            places.append(_Place(owner, name, dtensor_spec_of(parameter)))
    if not places:
        return
    # The whole module for what others than their owners use, and each owner for itself: activation
    # checkpointing calls it again in backward.
    owners = dict.fromkeys(place.owner for place in places)
    parts = {owner: [place for place in places if place.owner is owner] for owner in owners}
    for called, used in {**parts, module: places}.items():
        hooks = _Distributed(used)
        called.register_forward_pre_hook(hooks.before)
        # Also after a forward pass that raised: the next one would find old DTensors otherwise.
        called.register_forward_hook(hooks.after, always_call=True)
    for owner, owned in parts.items():  # a part of the model may be saved without the rest
        owner.register_state_dict_post_hook(partial(_save, owned))
        owner.register_load_state_dict_pre_hook(partial(_load, owned))
    _watch_optimizers()


# ---- optimizers


@cache
def _watch_optimizers() -> None:
    """Registers hooks that save the state of shards' optimizers as DTensors.

    The hooks are registered in an optimizer's first step; it has no state before.
    """
    before_every_step(_step_begins)


_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _step_begins(optimizer: Optimizer) -> None:
    if optimizer not in _known:
        _known.add(optimizer)
        optimizer.register_state_dict_post_hook(_save_state)
        optimizer.register_load_state_dict_post_hook(_load_state)
        _load_state(optimizer)  # what was loaded before the first step


def _save_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of an optimizer with DTensors in place of values of shards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state, unlike = dict(saved["state"]), set()
    for number, parameter in enumerate(parameters):
        spec = getattr(parameter, _SPEC, None)
        if spec is None or number not in state:
            continue
        state[number], names = _distributed_state(state[number], parameter.shape, spec)
        unlike |= names
    if unlike:
        warnings.warn(
            f"{type(optimizer).__name__}.state_dict: {', '.join(sorted(unlike))} have other shapes "
            f"than the parameters. They are of this rank's shards, and "
            f"torch.distributed.checkpoint would keep those of one rank for all ranks of tensor "
            f"parallelism: save this optimizer by torch.save, in a file for each rank",
            RuntimeWarning,
            stacklevel=2,
        )
    return {**saved, "state": state}


def _distributed_state(
    state: Mapping[str, Any], shape: torch.Size, spec: Any
) -> tuple[dict[str, Any], set[str]]:
    """Returns an optimizer's state of a shard with DTensors, and the names of what is none."""
    unlike: set[str] = set()

    def distributed(name: str, value: Tensor) -> Any:
        if value.shape == shape:
            return _distributed(value, spec)
        if value.numel() > 1:
            unlike.add(name)
        return value

    return _with_tensors(state, distributed), unlike


def _load_state(optimizer: Optimizer) -> None:
    """Replaces whole tensors in a loaded optimizer state by this rank's shards."""
    for parameter, state in optimizer.state.items():
        spec = getattr(parameter, _SPEC, None)
        if spec is None:
            continue

        def shard(
            _: str, value: Tensor, shape: torch.Size = parameter.shape, spec: Any = spec
        ) -> Any:
            return _shard_of(value, shape, spec)

        state.update(_with_tensors(state, shard))


def _with_tensors(state: Mapping[str, Any], change: Callable[[str, Tensor], Any]) -> dict[str, Any]:
    """Returns a state, and the dictionaries in it, with each tensor changed."""
    changed: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            changed[name] = change(name, value)
        else:
            nested = isinstance(value, Mapping)
            changed[name] = _with_tensors(value, change) if nested else value
    return changed
