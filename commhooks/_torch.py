"""Looks up every private name of torch that ``commhooks`` uses, so that a rename is mended here.

Those that ``ddp_core`` uses as well are in ``ddp_core/_torch.py``. ``tests/torch_names.txt`` lists
all of them with the versions of torch that have them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from operator import attrgetter
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _OptimizerHookState as OptimizerHookState,
)
from torch.distributed.distributed_c10d import _get_object_coll_device as device_of_objects
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultAllocMixin,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        _get_gradient_divide_factors as divide_factors,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
    )

__all__ = [
    "ALL_REDUCE",
    "COLLECTIVES",
    "REDUCE_SCATTER",
    "SCATTERING",
    "UNSAFE_VIEW",
    "WRAPPERS",
    "AllGather",
    "DDPMeshInfo",
    "DefaultAllGather",
    "DefaultAllocMixin",
    "DefaultReduceScatter",
    "FSDPMeshInfo",
    "OptimizerHookState",
    "ReduceScatter",
    "TorchDispatchMode",
    "base_of",
    "coalesced_calls",
    "comm_hooks",
    "composable_ddp",
    "composable_hooks",
    "composable_options",
    "device_of_objects",
    "divide_factors",
    "dtensor_spec_before",
    "dtensor_specs_in",
    "flat_masks",
    "flat_names",
    "flat_originals",
    "flat_parameter",
    "flat_shapes",
    "foreach_add",
    "forward_pre_hooks",
    "fsdp1_hook",
    "fsdp1_synchronises",
    "fsdp2_gather",
    "fsdp2_groups",
    "fsdp2_is_in_backward",
    "fsdp2_module_name",
    "fsdp2_ranks",
    "fsdp2_state",
    "is_in_fsdp1_backward",
    "knows_comm_hooks",
    "logging_data",
    "made_subclass",
    "move_to_group",
    "owner_of",
    "reducer_buckets",
    "replicate",
    "set_fsdp1_hook",
    "set_fsdp2_gather",
    "size_before",
    "tree_map",
    "without_overrides",
    "wrapped_parameters",
]

# Imported when they are asked for: only models of FSDP need it, and it takes half a second.
_FSDP2 = "torch.distributed.fsdp._fully_shard"
_LATER = {
    "AllGather": f"{_FSDP2}._fsdp_api:AllGather",
    "DDPMeshInfo": f"{_FSDP2}._fsdp_common:DDPMeshInfo",
    "DefaultAllGather": f"{_FSDP2}._fsdp_collectives:DefaultAllGather",
    "DefaultAllocMixin": f"{_FSDP2}._fsdp_collectives:DefaultAllocMixin",
    "DefaultReduceScatter": f"{_FSDP2}._fsdp_collectives:DefaultReduceScatter",
    "FSDPMeshInfo": f"{_FSDP2}._fsdp_common:FSDPMeshInfo",
    "ReduceScatter": f"{_FSDP2}._fsdp_api:ReduceScatter",
    "divide_factors": f"{_FSDP2}._fsdp_collectives:_get_gradient_divide_factors",
    "replicate": "torch.distributed._composable.replicate:replicate",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = resolve_name(_LATER[name])
        return value


# ---- tensors and modules

foreach_add = torch._foreach_add_
UNSAFE_VIEW = torch.ops.aten._unsafe_view
# The parts of names that torch.compile, activation checkpointing and FSDP add.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
made_subclass: Any = Tensor._make_subclass
# The tensor that another one is a view of; None: it is no view.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
# Within it, functions of torch do not call ``__torch_function__`` of subclasses.
without_overrides: Any = torch._C.DisableTorchFunctionSubclass


def forward_pre_hooks(module: nn.Module) -> MutableMapping[int, Any]:
    """Returns the forward pre-hooks of a module, by the number of their handle."""
    return module._forward_pre_hooks


# ---- DistributedDataParallel


def comm_hooks(ddp: nn.Module) -> list[tuple[Any, Any]]:
    """Returns the registered communication hooks, each with its state."""
    hooks: Any = ddp._comm_hooks
    with_states: list[tuple[Any, Any]] = hooks
    return with_states


def wrapped_parameters(ddp: Any) -> list[nn.Parameter]:
    """Returns the trained parameters that torch's class had when it was made."""
    parameters: list[nn.Parameter] = ddp._module_parameters
    return parameters


def knows_comm_hooks(ddp: DistributedDataParallel) -> bool:
    """Whether the constructor has made the list of hooks."""
    return hasattr(ddp, "_comm_hooks")


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Returns the settings and bucket sizes that torch logs."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()
    return data


def reducer_buckets(reducer: Any) -> list[Any]:
    """Returns the buckets, with zeros for gradients."""
    buckets: list[Any] = reducer._get_zeros_like_grad_buckets()
    return buckets


def move_to_group(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Makes a model average over another process group."""
    ddp._update_process_group(group)


def composable_ddp(state: Any) -> DistributedDataParallel:
    """Returns the DistributedDataParallel that a module of ``replicate()`` has made."""
    ddp: DistributedDataParallel = state._ddp
    return ddp


def composable_hooks(state: Any) -> Sequence[Any]:
    """Returns the hooks that a module of ``replicate()`` will register."""
    hooks: Sequence[Any] = state._comm_hook_args
    return hooks


def composable_options(state: Any) -> dict[str, Any]:
    """Returns the arguments that ``replicate()`` was called with."""
    options: dict[str, Any] = state._init_kwargs
    return options


# ---- process groups

# What torch looks up in a Python class first. Where it finds nothing it may call the backend with
# the interpreter's lock held, which waits for ever if a thread of Gloo drops a Python object
# meanwhile: that thread has Gloo's own lock, and wants the interpreter's. Some names are of one
# version only.
COLLECTIVES = (
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced"),
    *("alltoall", "alltoall_base", "barrier", "broadcast", "gather", "gather_single", "recv"),
    *("recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)
# Two names of one method, of which a version of torch calls one.
SCATTERING = ("reduce_scatter_single", "_reduce_scatter_base")


def coalesced_calls() -> dict[Any, Any]:
    """Returns the calls that torch's ``_coalescing_manager`` has collected, by group."""
    calls: dict[Any, Any] = dist.distributed_c10d._world.pg_coalesce_state
    return calls


# ---- FSDP1: its units, and the flat parameter of each


def fsdp1_hook(unit: Any) -> tuple[Any, Any]:
    """Returns a unit's communication hook and its state; (None, None): it has none."""
    return unit._comm_hook, unit._comm_hook_state


def set_fsdp1_hook(unit: Any, hook: Any, state: Any) -> None:
    """Gives a unit a communication hook with a state of its own."""
    unit._comm_hook, unit._comm_hook_state = hook, state


def fsdp1_synchronises(unit: Any) -> bool:
    """Whether a unit is outside of ``no_sync``."""
    return bool(unit._sync_gradients)


def is_in_fsdp1_backward(unit: Any) -> bool:
    """Whether a unit waits for the end of a backward pass."""
    return getattr(unit, "_post_backward_callback_queued", False)


def flat_parameter(unit: Any) -> Any:
    """Returns a unit's flat parameter; None: it has no parameters."""
    handle = unit._handle
    return None if handle is None else handle.flat_param


def flat_names(flat: Any) -> Sequence[str]:
    """Returns the names of the parameters in a flat parameter."""
    names: Sequence[str] = flat._fqns
    return names


def flat_shapes(flat: Any) -> list[tuple[torch.Size, tuple[int, ...]]]:
    """Returns shapes and strides of the parameters in a flat parameter."""
    return list(zip(flat._shapes, flat._strides, strict=True))


def flat_masks(flat: Any) -> list[tuple[int, bool]]:
    """Returns the sizes of the spans of a flat parameter, and whether each is padding."""
    return list(zip(flat._numels_with_padding, flat._is_padding_mask, strict=True))


def flat_originals(flat: Any) -> Sequence[Any]:
    """Returns the parameters in a flat parameter; none without ``use_orig_params``."""
    return flat._params or ()


def dtensor_specs_in(flat: Any) -> Sequence[Any]:
    """Returns FSDP1's records of the DTensors that parameters were; None for a plain tensor."""
    specs: Sequence[Any] = flat._param_extensions
    return specs


# ---- FSDP2: its modules, their groups of parameters, and these parameters

# The attributes of a group of parameters that reduce its gradients.
REDUCE_SCATTER, ALL_REDUCE = "_reduce_scatter_comm", "_all_reduce_hook"


def fsdp2_state(module: Any) -> Any:
    """Returns FSDP2's state of a module."""
    return module._get_fsdp_state()


def fsdp2_groups(module: Any) -> Sequence[Any]:
    """Returns the groups of parameters that FSDP2 gathers and reduces for a module."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    group = state._fsdp_param_group  # up to torch 2.11 a module has one, or none
    return [] if group is None else [group]


def fsdp2_is_in_backward(state: Any) -> bool:
    """Whether a module's root waits for the end of a backward pass."""
    waits: bool = state._state_ctx.post_backward_final_callback_queued
    return waits


def fsdp2_ranks(group: Any) -> dist.ProcessGroup:
    """Returns the ranks that a group of parameters reduces over."""
    ranks: dist.ProcessGroup = group._reduce_scatter_process_group
    return ranks


def fsdp2_gather(group: Any) -> Any:
    """Returns the all-gather of a group of parameters."""
    return group._all_gather_comm


def set_fsdp2_gather(group: Any, gather: Any) -> None:
    """Makes a group of parameters gather by ``gather``."""
    group._all_gather_comm = gather


def fsdp2_module_name(group: Any) -> str:
    """Returns the name of the module that has a group of parameters; "" or None: the root."""
    return group._module_fqn or ""


def owner_of(parameter: Any) -> Any:
    """Returns the modules that have a parameter of FSDP2, and its name there."""
    return parameter._module_info


def size_before(parameter: Any) -> torch.Size:
    """Returns the shape that a parameter had before FSDP2 cut it."""
    size: torch.Size = parameter._orig_size
    return size


def dtensor_spec_before(parameter: Any) -> Any:
    """Returns the spec of the DTensor that a parameter was before FSDP2; None: it was none."""
    # The second is its name up to torch 2.11.
    return getattr(parameter, "_unsharded_dtensor_spec", getattr(parameter, "_tp_spec", None))
