"""Refuses FSDP2 models on which no scheme can run, and warns of parameters nobody averages."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from commhooks._torch import DDPMeshInfo, DefaultReduceScatter
from commhooks.core.user_line import user_line
from commhooks.errors import RegistrationError
from commhooks.hosts.fsdp2 import Replacement
from commhooks.hosts.fsdp2_model import FSDP2Model, parameter_of

__all__ = [
    "need_between",
    "need_free",
    "replica_ranks",
    "shard_ranks",
    "warn_of_others",
]

_OWN = (
    "FSDP2 averages over the replicas itself, since the model was sharded with a mesh of two "
    "dimensions; shard it over the ranks of a node only: "
    'fully_shard(module, mesh=mesh["shard"]), then '
    'register(model, scheme, between=mesh["replicate"])'
)


def warn_of_others(model: nn.Module, found: FSDP2Model) -> None:
    """Warns if a model trains parameters that no FSDP2 module has."""
    modules = [one.group.fsdp_params for one in found.modules]
    sharded = {id(parameter_of(one)) for some in modules for one in some}
    trained = {name: id(one) for name, one in model.named_parameters() if one.requires_grad}
    others = [name for name, one in trained.items() if one not in sharded]
    if others:
        warnings.warn(
            f"register: {', '.join(others[:3])}{', ...' * (len(others) > 3)}: in no FSDP2 module, "
            f"so nothing averages their gradients, and ranks drift apart. Call fully_shard(model) "
            f"before register; average parameters that you left out on purpose (ignored_params)",
            RuntimeWarning,
            stacklevel=user_line(),
        )


def need_free(found: FSDP2Model, kind: type[Replacement]) -> None:
    """Raises unless all modules communicate as FSDP2 does by itself, where a hook is to be."""
    for module in found.modules:
        present, hook = getattr(module.group, kind.place), kind.hook_of(module.group)
        if hook is not None:
            raise RegistrationError(
                f"register: this model already has the hook {hook}; change its scheme with "
                f"hook.switch(...)"
            )
        if present is not None and type(present) is not DefaultReduceScatter:
            raise RegistrationError(
                f"register: FSDP2 reduces by {present} already (set_custom_reduce_scatter, "
                f"set_all_reduce_hook, set_allocate_memory_from_process_group_for_comm or "
                f"set_symm_mem_for_comm), in whose place the scheme would be; leave that call out"
            )


def need_between(between: object) -> None:
    """Raises unless there are replicas to average over, or none were given."""
    if between is not None and not isinstance(between, DeviceMesh | dist.ProcessGroup):
        raise RegistrationError(
            f"register(between=...): a process group or a mesh of one dimension, such as "
            f'mesh["replicate"], got {between!r}'
        )


def shard_ranks(found: FSDP2Model) -> dist.ProcessGroup:
    """Returns the ranks over which FSDP2 reduces; raises if there is one only."""
    if found.ranks.size() > 1:
        return found.ranks
    if _averages_itself(found):
        raise RegistrationError(f"register: the model is sharded over one rank, and {_OWN}")
    raise RegistrationError(
        "register: the model is sharded over one rank, so FSDP2 reduces nothing; to average "
        'between replicas: register(model, scheme, between=mesh["replicate"])'
    )


def replica_ranks(found: FSDP2Model, between: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the ranks to average over; raises unless they are replicas that nobody averages."""
    group = between.get_group() if isinstance(between, DeviceMesh) else between
    if _averages_itself(found):
        raise RegistrationError(f"register(between=...): {_OWN}")
    same = set(dist.get_process_group_ranks(group)) & set(dist.get_process_group_ranks(found.ranks))
    if len(same) > 1:
        raise RegistrationError(
            f"register(between=...): ranks {sorted(same)} hold different shards of one replica, so "
            f"a mean over them would mix gradients of different parameters; pass the mesh or group "
            f'of ranks that hold the same shard, such as mesh["replicate"]'
        )
    return group


def _averages_itself(found: FSDP2Model) -> bool:
    return any(isinstance(one.group.mesh_info, DDPMeshInfo) for one in found.modules)
