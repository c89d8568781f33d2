"""What DistributedDataParallel checks of its arguments; messages are those that users know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index

from ddp_core.reducer.optimizer import has_optimizer_in_backward

__all__ = [
    "Placement",
    "check_hook",
    "check_parameters",
    "delayed",
    "placement",
    "process_group",
    "refuse_sync_batch_norm",
]


def process_group(
    module: nn.Module, group: dist.ProcessGroup | None, device_mesh: Any
) -> dist.ProcessGroup:
    """The ranks to average over."""
    if group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        if _root_mesh(device_mesh) != device_mesh:  # sliced out of one with tensor parallelism
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)
        mesh_group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return mesh_group
    if group is not None:
        return group
    if not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _root_mesh(device_mesh: Any) -> Any:
    """The mesh that ``device_mesh`` was sliced out of, or itself."""
    if hasattr(device_mesh, "_get_root_mesh"):
        return device_mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # torch 2.9

    return _mesh_resources.get_root_mesh(device_mesh)


def delayed(
    named: Sequence[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose all-reduce is delayed."""
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time."
        )
    return list(named or ())


def check_parameters(
    managed: Sequence[nn.Parameter], delayed: Sequence[tuple[str, nn.Parameter]]
) -> bool:
    """Raises if there is nothing to average; True if all of it is delayed."""
    for parameter in managed:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                "Modules with uninitialized parameters can't be used with "
                "`DistributedDataParallel`. Run a dummy forward pass to correctly initialize the "
                "modules"
            )
    early = [name for name, parameter in delayed if has_optimizer_in_backward([parameter])]
    if early:
        raise ValueError(
            f"DistributedDataParallel(delay_all_reduce_named_params=...): the optimizers of "
            f"{', '.join(early[:3])} run in backward (_apply_optimizer_in_backward), before the "
            f"delayed gradients are averaged; give these an optimizer of their own, or do not "
            f"delay them"
        )
    if any(parameter.requires_grad for parameter in managed):
        return False
    if not delayed:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient."
        )
    return True


class Placement(NamedTuple):
    """Where the model is."""

    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    several: bool


def placement(
    parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> Placement:
    """The model's device, and where inputs and outputs go."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            f"DistributedDataParallel's input module must be on the same type of devices, but "
            f"input module parameters locate in {types}."
        )
    device = parameters[0].device
    if not device_ids or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                f"DistributedDataParallel device_ids and output_device arguments only work with "
                f"single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return Placement(device, None, None, len(devices) > 1)
    index = _get_device_index(device_ids[0], True)
    output = index if output_device is None else _get_device_index(output_device, True)
    return Placement(device, [index], output, False)


def refuse_sync_batch_norm(module: nn.Module) -> None:
    """On the CPU it has no implementation."""
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def check_hook(hook: Any) -> None:
    """Refuses what is not a hook; annotations may be left out, or be text."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    annotations = getattr(hook, "__annotations__", {})
    if not _allowed(annotations.get("bucket"), "GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not _allowed(annotations.get("return"), "Future"):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def _allowed(annotation: Any, expected: str) -> bool:
    name = annotation if isinstance(annotation, str) else repr(annotation)
    return annotation is None or expected in name or name.endswith("Any")
