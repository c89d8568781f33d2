"""Defines ``replicate``, data parallelism by FSDP2 with a compressed all-reduce.

torch's own ``replicate()`` of FSDP2 averages by an all-reduce that nothing replaces. The same
machinery, sharded over one rank, reduces nothing; its hook between replicas does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from commhooks.core._scheme import Scheme
from commhooks.errors import RegistrationError
from commhooks.hook._registration import register
from commhooks.hook._state import HookState
from ddp_core._torch import device_types
from ddp_core.exchange._errors import listed

__all__ = ["replicate"]


def replicate(
    model: nn.Module,
    scheme: str | Scheme = "none",
    *,
    modules: Iterable[nn.Module] = (),
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    history: int = 100_000,
    fully_shard_options: dict[str, Any] | None = None,
    **options: Any,
) -> HookState:
    """Replicates a model by FSDP2 and averages its gradients by a scheme; all ranks call it.

    Args:
        model: the module, equal on all ranks; its parameters become DTensors.
        scheme: any scheme.
        modules: parts of the model whose gradients are exchanged by themselves, as soon as they are
            there, such as its layers; the rest is exchanged together.
        mesh: two dimensions, the first of size 1; by default all ranks.
        seed, history, options: see :func:`commhooks.register`.
        fully_shard_options: such as ``mp_policy``.

    Example:
        >>> hook = commhooks.fsdp.replicate(model, "powersgd", modules=model.layers, rank=4)
    """
    if not dist.is_initialized():
        raise RegistrationError(
            "replicate: no process group; call torch.distributed.init_process_group first"
        )
    if mesh is None:
        names = ("shard", "replicate")
        mesh = init_device_mesh(_device_of(model), (1, dist.get_world_size()), mesh_dim_names=names)
    if mesh.ndim != 2 or mesh.size(0) != 1 or not mesh.mesh_dim_names:
        raise RegistrationError(
            f"replicate(mesh=...): two named dimensions, the first of one rank, got {mesh}"
        )
    modules, present = list(modules), set(model.modules())
    if strange := [type(module).__name__ for module in modules if module not in present]:
        raise RegistrationError(
            f"replicate(modules=...): parts of the model, and {listed(strange)} is none"
        )
    shard, replicate = (mesh[name] for name in mesh.mesh_dim_names)
    settings = {"reshard_after_forward": False, **(fully_shard_options or {})}
    for module in [*modules, model]:
        fully_shard(module, mesh=shard, **settings)
    return register(model, scheme, replicate_group=replicate, seed=seed, history=history, **options)


def _device_of(model: nn.Module) -> str:
    """Returns the type of the device that a model is trained on."""
    lies_on: str = next((value.device.type for value in model.parameters()), "cpu")
    world: Any = dist.group.WORLD
    if lies_on in {device.type for device in device_types(world)}:
        return lies_on
    # On the host or on "meta", and NCCL averages: ``fully_shard`` moves it there, as by default.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
