"""Registers a scheme on FSDP2 modules: as their reduce-scatter, or between replicas (HSDP)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from commhooks.checkpoint.names import plain_names
from commhooks.core.scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.sharded_bucket import need_shards
from commhooks.hook.sharded_parameters import OwnShards, Sharded, ShardedParameters
from commhooks.hook.state import HookState
from commhooks.hook.verify import Verification, attach
from commhooks.hosts.fsdp2 import BetweenNodes, Module, SchemeReduceScatter
from commhooks.hosts.guard import Guard
from commhooks.wrappers.make import describe

__all__ = ["Found", "register_on_fsdp2"]

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
    place = _INSIDE if between is None else _BETWEEN
    for module in found.modules:
        _need_free(getattr(module.group, place))
    if between is None and found.ranks.size() == 1:
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
    hook._attendance.dismiss()  # the guard says where it would not run
    if between is None:
        need_shards(hook.scheme, "FSDP2")
        hook.shards_for, hook.compared_with = "FSDP2", "reduce-scatter"
    shards, known = found.ranks, ShardedParameters(found.parameters, found.ranks.size())
    if between is not None and shards.size() > 1:
        known = OwnShards(found.parameters, shards.size(), shards.rank())
        hook._binding.shards = shards
    hook._binding.adopt_sharded(model, known, group, found.modules[0].group.device)
    if verification is not None:
        attach(hook, verification, further_rounds=int(between is None))
    hook.stays = "its host decides over which ranks it shards; register a hook on a model of others"
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

    model.register_forward_pre_hook(Guard(hook, _groups(model), _groups, has_hook))
    return hook


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


class Found(NamedTuple):
    """Holds the FSDP2 modules of a model, their parameters, and the ranks of the shards."""

    modules: list[Module]
    parameters: list[Sharded]
    ranks: dist.ProcessGroup

    @classmethod
    def of(cls, model: nn.Module, call: str = "register") -> Found:
        groups = list(_groups(model).values())
        if not groups:
            raise RegistrationError(
                f"{call}: {type(model).__name__} has no FSDP2 module with parameters; shard it "
                f"before, fully_shard(model)"
            )
        if any(not isinstance(group.mesh_info, FSDPMeshInfo) for group in groups):
            raise RegistrationError(
                f"{call}: a model of replicate() on FSDP2 gathers nothing, and averages its "
                f"gradients by an all-reduce that takes no scheme; commhooks.hosts.replicate("
                f"model, scheme) does the same with a scheme"
            )
        ranks = groups[0]._reduce_scatter_process_group
        if any(group._reduce_scatter_process_group is not ranks for group in groups):
            raise RegistrationError(
                f"{call}: the FSDP2 modules of this model are sharded over different ranks; take "
                f"each of them by itself"
            )
        by_id = {id(value): name for name, value in model.named_parameters()}
        plain = plain_names(by_id.values())
        pairs = [(one, group) for group in groups for one in group.fsdp_params]
        sharded = {id(one): id(_parameter(one)) for one, _ in pairs}
        names = {one: plain[by_id[value]] for one, value in sharded.items()}
        _warn_of_others(model, set(sharded.values()))
        parameters = [_sharded(one, names[id(one)], group) for one, group in pairs]
        modules = [Module(number, group, names) for number, group in enumerate(groups)]
        return cls(modules, parameters, ranks)


def _groups(model: nn.Module) -> dict[str, Any]:
    """Returns FSDP2's groups of parameters, by the name of the (first) module that has each."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        groups = (
            module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
        )
        if len(groups) > 1:
            raise RegistrationError(
                f"register: the parameters of the FSDP2 module {name or 'root'} are on several "
                f"meshes (shard_placement_fn), and it takes no reduction from outside"
            )
        # Modules that were sharded together, fully_shard([a, b]), have one.
        if groups and groups[0] not in found.values():
            found[name] = groups[0]
    return found


def _parameter(sharded: Any) -> nn.Parameter:
    """Returns what the module has now, which FSDP2 takes note of in the first forward pass."""
    place = sharded._module_info
    parameter: nn.Parameter = getattr(place.module, place.param_name)
    return parameter


def _warn_of_others(model: nn.Module, sharded: set[int]) -> None:
    """Warns if a model trains parameters that no FSDP2 module has."""
    trained = {name: id(one) for name, one in model.named_parameters() if one.requires_grad}
    others = [name for name, one in trained.items() if one not in sharded]
    if others:
        warnings.warn(
            f"register: {', '.join(others[:3])}{', ...' * (len(others) > 3)}: in no FSDP2 module, "
            f"so averaged by nobody: ranks drift apart. Shard the whole model as well, "
            f"fully_shard(model), or average what was left out on purpose (ignored_params)",
            RuntimeWarning,
            stacklevel=5,
        )


def _sharded(parameter: Any, name: str, group: Any) -> Sharded:
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    trained = parameter.sharded_param.requires_grad
    return Sharded(name, parameter._orig_size, dtype, parameter.fsdp_placement.dim, trained)


def _replicas(found: Found, between: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    group = between.get_group() if isinstance(between, DeviceMesh) else between
    if any(isinstance(one.group.mesh_info, DDPMeshInfo) for one in found.modules):
        raise RegistrationError(
            "register(between=...): FSDP2 averages over these replicas itself, since the model was "
            "sharded with a mesh of two dimensions; shard it over the ranks of a node only: "
            'fully_shard(module, mesh=mesh["shard"]), then '
            'register(model, scheme, between=mesh["replicate"])'
        )
    same = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(found.ranks))
    if len(same) > 1:
        raise RegistrationError(
            f"register(between=...): ranks {sorted(same)} have different shards of one replica, "
            f"and a mean over them is none of gradients; give the mesh or group of those ranks "
            f'that have the same shard, such as mesh["replicate"]'
        )
    return group
