"""Describes the FSDP2 modules of a model: their parameters, and the ranks of the shards."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from commhooks._torch import (
    FSDPMeshInfo,
    dtensor_spec_before,
    fsdp2_groups,
    fsdp2_ranks,
    owner_of,
    size_before,
)
from commhooks.checkpoint.placement import cut_of
from commhooks.core.names import plain_names
from commhooks.errors import RegistrationError
from commhooks.hook.sharded_parameters import ShardedParameter
from commhooks.hosts.fsdp2_module import FSDP2Module

__all__ = ["FSDP2Model", "groups_of", "parameter_of"]


class FSDP2Model(NamedTuple):
    """Describes a model that was sharded by FSDP2.

    Attributes:
        modules: those that reduce gradients, in the order of ``named_modules``.
        parameters: of all these modules.
        ranks: the ranks that FSDP2 shards and reduces over.
    """

    modules: list[FSDP2Module]
    parameters: list[ShardedParameter]
    ranks: dist.ProcessGroup

    @classmethod
    def of(cls, model: nn.Module, call: str = "register") -> FSDP2Model:
        """Reads them from a model; raises RegistrationError unless all have the same ranks.

        Args:
            call: the public call, for the messages.
        """
        groups = list(groups_of(model, call).values())
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
        ranks = fsdp2_ranks(groups[0])
        if any(fsdp2_ranks(group) is not ranks for group in groups):
            raise RegistrationError(
                f"{call}: the FSDP2 modules of this model are sharded over different ranks; take "
                f"each of them by itself"
            )
        by_id = {id(value): name for name, value in model.named_parameters()}
        plain = plain_names(by_id.values())
        pairs = [(one, group) for group in groups for one in group.fsdp_params]
        sharded = {id(one): id(parameter_of(one)) for one, _ in pairs}
        names = {one: plain[by_id[value]] for one, value in sharded.items()}
        parameters = [_sharded(one, names[id(one)], group) for one, group in pairs]
        modules = [FSDP2Module(number, group, names) for number, group in enumerate(groups)]
        return cls(modules, parameters, ranks)


def groups_of(model: nn.Module, call: str = "register") -> dict[str, Any]:
    """Returns FSDP2's groups of parameters, by the name of the (first) module that has each."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        groups = fsdp2_groups(module) if isinstance(module, FSDPModule) else []
        if len(groups) > 1:
            raise RegistrationError(
                f"{call}: the parameters of the FSDP2 module {name or 'root'} are on several "
                f"meshes (shard_placement_fn), and it takes no reduction from outside"
            )
        # Modules that were sharded together, fully_shard([a, b]), have one.
        if groups and groups[0] not in found.values():
            found[name] = groups[0]
    return found


def parameter_of(sharded: Any) -> nn.Parameter:
    """Returns the parameter that the module has now.

    It may have been replaced since ``fully_shard``; FSDP2 looks again in the first forward pass.
    """
    place = owner_of(sharded)
    parameter: nn.Parameter = getattr(place.module, place.param_name)
    return parameter


def _sharded(parameter: Any, name: str, group: Any) -> ShardedParameter:
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    trained = parameter.sharded_param.requires_grad
    cut = cut_of(dtensor_spec_before(parameter))
    return ShardedParameter(
        name, size_before(parameter), dtype, parameter.fsdp_placement.dim, trained, cut
    )
