"""Checks the arguments of DistributedDataParallel, with torch's messages where torch has them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_core._torch import device_index, ignored_names
from ddp_core.ddp._replica import Placement, Replica
from ddp_core.exchange._errors import listed
from ddp_core.reducer._optimizer import has_optimizer_in_backward

__all__ = [
    "check_hook",
    "check_no_sync_batch_norm",
    "check_parameters",
    "delayed",
    "process_group",
    "reduced_dtype",
    "replica",
    "warn_of_broadcast_buffers",
    "warn_of_check_reduction",
    "warn_that_static_finds_unused",
]


def process_group(group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Returns the ranks to average over."""
    if group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
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


def delayed(
    named: Sequence[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters whose all-reduce is delayed."""
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the "
            "same time."
        )
    return list(named or ())


def check_parameters(
    managed: Sequence[nn.Parameter], delayed: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Raises if there is nothing to average, or if it cannot be averaged."""
    for parameter in managed:
        # It has no shape yet, so there is nothing to lay out in buckets.
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
            f"{listed(early)} run in backward (_apply_optimizer_in_backward), before the "
            f"delayed gradients are averaged; give these an optimizer of their own, or do not "
            f"delay them"
        )
    if not delayed and not any(parameter.requires_grad for parameter in managed):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient."
        )


def replica(
    module: nn.Module,
    group: dist.ProcessGroup,
    delayed: Sequence[tuple[str, nn.Parameter]],
    device_ids: Sequence[Any] | None,
    output_device: Any,
) -> Replica:
    """Returns the model of this rank, without delayed and ignored parameters."""
    ignored = set(ignored_names(module))
    ignored |= {name for name, _ in delayed}
    managed = [parameter for name, parameter in module.named_parameters() if name not in ignored]
    check_parameters(managed, delayed)
    present = managed or [parameter for _, parameter in delayed]
    return Replica(module, ignored, _placement(present, device_ids, output_device), group)


def _placement(
    parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> Placement:
    """Returns the device of the model, and those of inputs and outputs."""
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
    # Inputs are moved only where the whole model is on one accelerator.
    if not device_ids or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device:
            raise ValueError(
                f"DistributedDataParallel device_ids and output_device arguments only work with "
                f"single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}."
            )
        return Placement(device, None, None, len(devices) > 1)
    index = device_index(device_ids[0], True)
    output = index if output_device is None else device_index(output_device, True)
    return Placement(device, [index], output, False)


def reduced_dtype(mixed_precision: Any) -> torch.dtype | None:
    """Returns the dtype of gradients while they are averaged; None: their own."""
    if mixed_precision is None:
        return None
    dtype: torch.dtype | None = mixed_precision.reduce_dtype or mixed_precision.param_dtype
    return dtype


def check_no_sync_batch_norm(module: nn.Module) -> None:
    """Raises if a model on the CPU has SyncBatchNorm layers, which do not run there."""
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def check_hook(hook: Any) -> None:
    """Raises unless a hook is callable and its annotations, if any, fit; they may be strings."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    annotations = getattr(hook, "__annotations__", {})
    if not _allowed(annotations.get("bucket"), "GradBucket"):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if not _allowed(annotations.get("return"), "Future"):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )


def warn_of_check_reduction(*, stacklevel: int) -> None:
    """Warns that ``check_reduction`` does nothing any more."""
    warnings.warn(
        "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please "
        "avoid using it.",
        FutureWarning,
        stacklevel=stacklevel,
    )


def warn_of_broadcast_buffers(*, both: bool, stacklevel: int) -> None:
    """Warns of ``broadcast_buffers`` as torch does, where torch has ``forward_sync_buffers``.

    Args:
        both: whether ``forward_sync_buffers`` was given as well.
    """
    if "forward_sync_buffers" not in inspect.signature(TorchDDP.__init__).parameters:
        return
    text = (
        "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` "
        "is deprecated and its value is ignored when `forward_sync_buffers` is provided."
        if both
        else "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. IMPORTANT: "
        "unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still syncs buffers at "
        "init. If you rely on buffers NOT being synced at init (e.g. rank-local buffers), keep "
        "using `broadcast_buffers=False` until `init_sync_buffers` is available."
    )
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)


def warn_that_static_finds_unused(*, stacklevel: int) -> None:
    """Warns that ``static_graph`` needs no ``find_unused_parameters``."""
    warnings.warn(
        "You passed find_unused_parameters=true to DistributedDataParallel, `_set_static_graph` "
        "will detect unused parameters automatically, so you do not need to set "
        "find_unused_parameters=true, just be sure these unused parameters will not change during "
        "training loop while calling `_set_static_graph`.",
        stacklevel=stacklevel,
    )


def _allowed(annotation: Any, expected: str) -> bool:
    # By name: postponed annotations are text, and torch's objects have several names.
    name = annotation if isinstance(annotation, str) else repr(annotation)
    return annotation is None or expected in name or name.endswith("Any")
