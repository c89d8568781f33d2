"""Looks up every private name of torch that ``ddp_core`` uses, so that a rename is mended here.

``tests/torch_names.txt`` lists them with the versions of torch that have them. Functions that every
step calls are bound once, not wrapped, so that they cost no further call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index as device_index
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AnyFuture",
    "active_module",
    "add_backend",
    "backend_of",
    "backend_timeout",
    "backward_number",
    "call_at_end",
    "children_of",
    "compiles",
    "current_node",
    "device_index",
    "device_types",
    "dtensor_spec_of",
    "dynamo_disable",
    "dynamo_disable_shallow",
    "foreach_copy",
    "foreach_divide",
    "foreach_multiply",
    "foreach_zero",
    "group_ranks",
    "ignored_names",
    "in_join",
    "is_known_group",
    "keeps_graph",
    "local_shape",
    "local_spec_of",
    "number_of_entries",
    "optimizers_in_backward",
    "profiler_runs",
    "set_default_backend",
    "set_group_name",
    "set_timeout",
    "sparse_indices",
    "sparse_values",
    "split_for",
    "splitter_module",
    "store_of",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version_of",
    "versions_kept",
    "will_run",
]

Function = TypeVar("Function", bound=Callable[..., Any])

# ---- autograd

# The number of this thread's backward pass; below 0: there is none.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
# The node that runs on this thread; None: no backward pass does.
current_node: Callable[[], Any] = torch._C._current_autograd_node
# Whether the backward pass under way will come to a node.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
# Whether the graph of the backward pass under way is kept for another pass.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled
# Runs a function when the backward pass under way has succeeded.
call_at_end: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
# Lets tensors change without autograd complaining in backward.
versions_kept: Callable[[tuple[Tensor, ...]], AbstractContextManager[None]] = (
    torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
)
# How often a tensor was written to in place.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# The class of futures that collectives give; ``torch.futures.Future`` is one of its subclasses.
AnyFuture = torch._C.Future

# ---- tensors

foreach_copy = torch._foreach_copy_
foreach_divide = torch._foreach_div_
foreach_multiply = torch._foreach_mul_
foreach_zero = torch._foreach_zero_
# Of a sparse tensor that may have an index several times.
sparse_indices: Callable[[Tensor], Tensor] = Tensor._indices
sparse_values: Callable[[Tensor], Tensor] = Tensor._values
number_of_entries: Callable[[Tensor], int] = Tensor._nnz
# Mesh, placements and shape of a DTensor.
dtensor_spec_of: Callable[[Any], Any] = attrgetter("_spec")


def local_spec_of(parameter: Tensor) -> Any:
    """Returns the specification that torch's DistributedDataParallel stores with a local shard."""
    return getattr(parameter, "_st_info", None)


def optimizers_in_backward(parameter: Tensor) -> Sequence[Any] | None:
    """Returns the optimizers that step a parameter in backward, or None if it has none."""
    return getattr(parameter, "_in_backward_optimizers", None)


def local_shape(spec: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the sizes of this rank's shard of a DTensor, and where each dimension begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)


# ---- modules

# The modules that belong to a module itself, by name; live.
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def ignored_names(module: nn.Module) -> Iterable[str]:
    """Returns the parameters and buffers of a module that data parallelism ignores."""
    names: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def in_join(module: Any) -> bool:
    """Whether a DistributedDataParallel runs in torch's ``Join``."""
    enabled: bool = module._join_config.enable
    return enabled


# ---- torch.compile


def dynamo_disable(function: Function) -> Function:
    """Makes torch.compile skip a function and all that it calls; the graph breaks there."""
    decorated: Any = torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]
    return decorated  # type: ignore[no-any-return]


def dynamo_disable_shallow(function: Function) -> Function:
    """Makes torch.compile skip a function, but not the functions that it calls."""
    decorated: Any = torch._disable_dynamo(function, recursive=False)  # type: ignore[attr-defined]
    return decorated  # type: ignore[no-any-return]


def compiles() -> bool:
    """Whether torch's compiler has been imported; importing it takes a second."""
    return "torch._dynamo" in sys.modules


def splitter_module() -> Any:
    """Imports the compiler's module with ``DDPOptimizer``, which splits graphs at buckets."""
    from torch._dynamo.backends import distributed

    return distributed


# The module that the compiler splits graphs for, and how it is set. They run where modules may be
# compiled: functions of Python would be compiled, too.
active_module: Callable[[], Any] = partial(getattr, TorchDDP, "_active_ddp_module")
split_for: Callable[[Any], None] = partial(setattr, TorchDDP, "_active_ddp_module")


# ---- process groups


def backend_of(group: Any, device: torch.device) -> Any:
    """Returns the backend of a group for a device; raises if there is none."""
    return group._get_backend(device)


def device_types(group: Any) -> Sequence[torch.device]:
    """Returns the types of device that a group has backends for; empty if unknown."""
    return getattr(group, "_device_types", ())


def backend_timeout(options: Any) -> timedelta:
    """Returns the timeout in the options of a backend."""
    timeout: timedelta = options._timeout
    return timeout


def store_of(group: dist.ProcessGroup) -> Any:
    """Returns the store of a group that torch.distributed has made."""
    return dist.distributed_c10d._get_process_group_store(group)


def is_known_group(group: Any) -> bool:
    """Whether torch.distributed has made a group, and has not destroyed it."""
    return group in dist.distributed_c10d._world.pg_map


def group_ranks() -> dict[Any, dict[int, int]]:
    """Returns the ranks of each group that torch.distributed knows, by rank in the job."""
    ranks_of_groups: dict[Any, dict[int, int]] = dist.distributed_c10d._world.pg_group_ranks
    return ranks_of_groups


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Writes a timeout into the options of a backend."""
    options._timeout = timeout


def add_backend(group: Any, device: torch.device, kind: Any, backend: Any) -> None:
    """Makes a group carry tensors of a device by ``backend``."""
    group._register_backend(device, kind, backend)


def set_default_backend(group: Any, kind: Any) -> None:
    """Makes a group use a backend of this kind for tensors of any other device."""
    group._set_default_backend(kind)


def set_group_name(group: Any, name: str) -> None:
    """Names a group that torch.distributed has not made."""
    group._set_group_name(name)
