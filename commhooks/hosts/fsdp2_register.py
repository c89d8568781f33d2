"""Registers a scheme on FSDP2 modules: as their reduce-scatter, or between replicas (HSDP)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from commhooks.core.scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.settle import settle
from commhooks.hook.sharded_parameters import OwnShards, ShardedParameters
from commhooks.hook.state import HookState
from commhooks.hook.verify import Verification
from commhooks.hosts.fsdp2 import BetweenNodes, SchemeReduceScatter
from commhooks.hosts.fsdp2_found import Found, groups_of, parameter_of
from commhooks.hosts.guard import Guard
from commhooks.wrappers.make import describe

__all__ = ["register_on_fsdp2"]

# Attributes of FSDP2's groups of parameters, where a communication is replaced.
_INSIDE, _BETWEEN = "_reduce_scatter_comm", "_all_reduce_hook"


def register_on_fsdp2(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    between: DeviceMesh | dist.ProcessGroup | None = None,
    seed: int = 0,
    history: int = 100_000,
    verification: Verification | None = None,
    **options: Any,
) -> HookState:
    """Registers a scheme on all FSDP2 modules of a model; see :func:`commhooks.register`.

    Args:
        between: replicas to average over after FSDP2 has reduced over its own ranks; None: the
            scheme replaces FSDP2's reduce-scatter.
        verification: of its steps; None: none.
    """
    if between is not None and not isinstance(between, DeviceMesh | dist.ProcessGroup):
        raise RegistrationError(
            f"register(between=...): a process group or a mesh of one dimension, such as "
            f'mesh["replicate"], got {between!r}'
        )
    found = Found.of(model)
    _warn_of_others(model, found)
    place = _INSIDE if between is None else _BETWEEN
    for module in found.modules:
        _need_free(getattr(module.group, place))
    if between is None and found.ranks.size() == 1:
        if _averages_itself(found):
            raise RegistrationError(f"register: the model is sharded over one rank, and {_OWN}")
        raise RegistrationError(
            "register: the model is sharded over one rank, so FSDP2 reduces nothing; to average "
            "between replicas: register(model, scheme, between=mesh)"
        )
    group = found.ranks if between is None else _replicas(found, between)
    made: Callable[..., HookState] = partial(HookState, scheme)
    if scheme == "auto":
        # By its name: it predicts with hooks, so that its module is above this one.
        kind: Any = resolve_name("commhooks.predict.sharded_auto:ShardedAutoHook")
        made = partial(kind, shards=between is None)
    hook = made(process_group=group, seed=seed, history=history, **options)
    shards, known = found.ranks, ShardedParameters(found.parameters, found.ranks.size())
    if between is not None and shards.size() > 1:
        known = OwnShards(found.parameters, shards.size(), shards.rank())
        hook._binding.shards = shards
    device, shards_for = found.modules[0].group.device, "FSDP2" if between is None else ""
    settle(hook, model, known, group, device, shards_for=shards_for, verification=verification)
    other = _other_hook(found, place)
    hook._binding.beside = _beside(found, between, other)
    facts = {
        "host": f"FSDP2 {place}",
        "other place": None if other is None else describe(other.scheme),
    }
    hook.agree("commhooks.register", facts, MEETING)
    if other is not None:
        inside, outside = (hook, other) if between is None else (other, hook)
        inside._binding.beside[:] = _beside(found, None, outside)
        inside._runner.continue_in(outside._runner)
    kind_of = SchemeReduceScatter if between is None else BetweenNodes
    for module in found.modules:
        setattr(module.group, place, kind_of(hook, module, known))

    def has_hook(group: Any) -> bool:
        return getattr(getattr(group, place), "_hook", None) is hook

    # Looked up once: a model may have thousands of modules.
    states = [one._get_fsdp_state() for one in model.modules() if isinstance(one, FSDPModule)]
    need_ready = partial(_need_reset, states)
    model.register_forward_pre_hook(Guard(hook, groups_of(model), groups_of, has_hook, need_ready))
    return hook


def _need_reset(states: list[Any]) -> None:
    """Raises if FSDP2 takes the pass that begins for a part of one that has raised.

    It would compute with parameters that it gathered before, and leave gradients unreduced.
    """
    if any(state._state_ctx.post_backward_final_callback_queued for state in states):
        raise HookNotAttachedError(
            "commhooks: the last backward pass has raised, and FSDP2 is still in it: the gradients "
            "of the next one would be wrong. Call reset_iter_state() of the root FSDP2 module and "
            "zero_grad() on all ranks after such a pass; where this torch has no reset_iter_state, "
            "resume from a checkpoint"
        )


def _need_free(present: Any) -> None:
    """Raises unless a module reduces its gradients as FSDP2 does by itself."""
    if isinstance(present, SchemeReduceScatter | BetweenNodes):
        raise RegistrationError(
            f"register: this model already has the hook {present._hook}; change its scheme with "
            f"hook.switch(...)"
        )
    if present is not None and type(present) is not DefaultReduceScatter:
        raise RegistrationError(
            f"register: FSDP2 reduces by {present} already (set_custom_reduce_scatter, "
            f"set_all_reduce_hook, set_allocate_memory_from_process_group_for_comm or "
            f"set_symm_mem_for_comm), in whose place the scheme would be; leave that call out"
        )


def _other_hook(found: Found, place: str) -> HookState | None:
    """Returns the hook that the model has in the other place: within nodes, or between them."""
    other = getattr(found.modules[0].group, _BETWEEN if place == _INSIDE else _INSIDE)
    return other._hook if isinstance(other, SchemeReduceScatter | BetweenNodes) else None


def _beside(
    found: Found, between: DeviceMesh | dist.ProcessGroup | None, other: HookState | None
) -> list[dist.ProcessGroup]:
    """Returns the ranks that have other parts of what a hook averages.

    A loss scaler skips a step on all ranks, so a hook between nodes agrees with the other shards,
    and one within a node with the other nodes.
    """
    if between is not None:
        groups = [found.ranks]
    elif other is not None:
        groups = [other._binding.group()]
    else:
        infos = [one.group.mesh_info for one in found.modules]
        native = [one.replicate_process_group for one in infos if isinstance(one, DDPMeshInfo)]
        groups = native[:1]
    return [group for group in groups if group.size() > 1]


def _warn_of_others(model: nn.Module, found: Found) -> None:
    """Warns if a model trains parameters that no FSDP2 module has."""
    modules = [one.group.fsdp_params for one in found.modules]
    sharded = {id(parameter_of(one)) for some in modules for one in some}
    trained = {name: id(one) for name, one in model.named_parameters() if one.requires_grad}
    others = [name for name, one in trained.items() if one not in sharded]
    if others:
        warnings.warn(
            f"register: {', '.join(others[:3])}{', ...' * (len(others) > 3)}: in no FSDP2 module, "
            f"so averaged by nobody: ranks drift apart. Shard the whole model as well, "
            f"fully_shard(model), or average what was left out on purpose (ignored_params)",
            RuntimeWarning,
            stacklevel=4,
        )


_OWN = (
    "FSDP2 averages over the replicas itself, since the model was sharded with a mesh of two "
    "dimensions; shard it over the ranks of a node only: "
    'fully_shard(module, mesh=mesh["shard"]), then '
    'register(model, scheme, between=mesh["replicate"])'
)


def _averages_itself(found: Found) -> bool:
    return any(isinstance(one.group.mesh_info, DDPMeshInfo) for one in found.modules)


def _replicas(found: Found, between: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    group = between.get_group() if isinstance(between, DeviceMesh) else between
    if _averages_itself(found):
        raise RegistrationError(f"register(between=...): {_OWN}")
    same = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(found.ranks))
    if len(same) > 1:
        raise RegistrationError(
            f"register(between=...): ranks {sorted(same)} have different shards of one replica, "
            f"and a mean over them is none of gradients; give the mesh or group of those ranks "
            f'that have the same shard, such as mesh["replicate"]'
        )
    return group
