"""Registers a scheme on FSDP2 modules: as their reduce-scatter, or between replicas (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from commhooks.checkpoint.names import plain_names
from commhooks.core.scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.sharded_bucket import need_shards
from commhooks.hook.sharded_parameters import OwnShards, Sharded, ShardedParameters
from commhooks.hook.state import HookState
from commhooks.hosts.fsdp2 import BetweenNodes, Module, SchemeReduceScatter

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
    **options: Any,
) -> HookState:
    """Registers a scheme on all FSDP2 modules of a model; see :func:`commhooks.register`.

    Args:
        between: replicas to average over after FSDP2 has reduced over its own ranks; None: the
            scheme replaces FSDP2's reduce-scatter.
    """
    found = Found.of(model)
    place = _INSIDE if between is None else _BETWEEN
    present = getattr(found.modules[0].group, place)
    if isinstance(present, SchemeReduceScatter | BetweenNodes):
        raise RegistrationError(
            f"register: this model already has the hook {present._hook}; change its scheme with "
            f"hook.switch(...)"
        )
    if between is None and found.ranks.size() == 1:
        raise RegistrationError(
            "register: the model is sharded over one rank, so FSDP2 reduces nothing; to average "
            "between replicas: register(model, scheme, between=mesh)"
        )
    group = found.ranks if between is None else _replicas(found, between)
    hook = HookState(scheme, process_group=group, seed=seed, history=history, **options)
    if between is None:
        need_shards(hook.scheme, "FSDP2")
        known = ShardedParameters(found.parameters, found.ranks.size())
    else:
        known = OwnShards(found.parameters, found.ranks.size(), found.ranks.rank())
    hook._binding.adopt_sharded(model, known, group)
    hook._attendance.dismiss()  # the guard says where it would not run
    hook.stays = "its host decides over which ranks it shards; register a hook on a model of others"
    hook.agree("commhooks.register", {"host": f"FSDP2 {place}"}, MEETING)
    kind = SchemeReduceScatter if between is None else BetweenNodes
    installed = [(module.group, kind(hook, module, known)) for module in found.modules]
    for parameters, own in installed:
        setattr(parameters, place, own)
    model.register_forward_pre_hook(_Guard(hook, place, installed))
    return hook


class _Guard:
    """Tells a hook when a forward pass begins, once it is known to be installed still."""

    def __init__(self, hook: HookState, place: str, installed: Sequence[tuple[Any, Any]]) -> None:
        self._hook, self._place, self._installed = hook, place, installed

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for group, own in self._installed:
            if getattr(group, self._place) is not own:
                raise HookNotAttachedError(
                    f"commhooks: {self._hook} would not run: FSDP2 module "
                    f"{group._module_fqn or 'root'} was given another reduction "
                    f"(set_custom_reduce_scatter or set_all_reduce_hook) after register"
                )
        self._hook.forward_begins()


class Found(NamedTuple):
    """Holds the FSDP2 modules of a model, their parameters, and the ranks of the shards."""

    modules: list[Module]
    parameters: list[Sharded]
    ranks: dist.ProcessGroup

    @classmethod
    def of(cls, model: nn.Module) -> Found:
        states = [one._get_fsdp_state() for one in model.modules() if isinstance(one, FSDPModule)]
        if any(len(state._fsdp_param_groups) > 1 for state in states):
            raise RegistrationError(
                "register: an FSDP2 module whose parameters are on several meshes "
                "(shard_placement_fn) takes no reduction from outside"
            )
        groups = [group for state in states for group in state._fsdp_param_groups]
        if not groups:
            raise RegistrationError("register: no FSDP2 module of this model has parameters")
        if any(not isinstance(group.mesh_info, FSDPMeshInfo) for group in groups):
            raise RegistrationError(
                "register: a model of replicate() on FSDP2 averages its gradients by an all-reduce "
                "that takes no scheme; commhooks.hosts.replicate(model, scheme) does the same with "
                "a scheme"
            )
        ranks = groups[0]._reduce_scatter_process_group
        if any(group._reduce_scatter_process_group is not ranks for group in groups):
            raise RegistrationError(
                "register: the FSDP2 modules of this model are sharded over different ranks; "
                "register each of them by itself"
            )
        by_id = {id(value): name for name, value in model.named_parameters()}
        plain = plain_names(by_id.values())
        pairs = [(one, group) for group in groups for one in group.fsdp_params]
        names = {id(one): plain[by_id[id(one.sharded_param)]] for one, _ in pairs}
        parameters = [_sharded(one, names[id(one)], group) for one, group in pairs]
        modules = [Module(number, group, names) for number, group in enumerate(groups)]
        return cls(modules, parameters, ranks)


def _sharded(parameter: Any, name: str, group: Any) -> Sharded:
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    return Sharded(name, parameter._orig_size, dtype, parameter.fsdp_placement.dim)


def _replicas(found: Found, between: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    group = between.get_group() if isinstance(between, DeviceMesh) else between
    if any(isinstance(one.group.mesh_info, DDPMeshInfo) for one in found.modules):
        raise RegistrationError(
            "register(between=...): FSDP2 averages over these replicas itself, since the model was "
            "sharded with a mesh of two dimensions; shard it over the ranks of a node only: "
            'fully_shard(module, mesh=mesh["shard"]), then '
            'register(model, scheme, between=mesh["replicate"])'
        )
    return group
