"""Finds the DistributedDataParallel in what the user holds, and the names of its parameters."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._errors import RegistrationError

__all__ = ["find_ddp", "find_owner", "memory_order", "parameter_names", "permuted"]


def find_ddp(model: object) -> DistributedDataParallel:
    """``model`` itself, or the one DistributedDataParallel inside it.

    Raises:
        RegistrationError: there is none, or more than one.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    if not isinstance(model, nn.Module):
        raise RegistrationError(
            f"register(model, ...) takes a DistributedDataParallel module, got "
            f"{type(model).__name__}"
        )
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise RegistrationError(
            f"register: {type(model).__name__} holds {len(inside)} DistributedDataParallel "
            f"modules; register a hook on each"
        )
    kinds = {type(module).__name__ for module in model.modules()}
    if any("FSDP" in kind or "FullySharded" in kind for kind in kinds):
        raise RegistrationError(
            "register: the model is sharded (FSDP), which reduces gradients itself and takes no "
            "DDP hook; wrap it in DistributedDataParallel instead"
        )
    raise RegistrationError(
        f"register: {type(model).__name__} is not wrapped in DistributedDataParallel, so nothing "
        f"would call the hook: model = torch.nn.parallel.DistributedDataParallel(model) first"
    )


def find_owner(state: object) -> DistributedDataParallel | None:
    """The DistributedDataParallel on which ``state`` was registered by ``register_comm_hook``.

    torch tells a hook its parameters but not its model. Looked up once, at the first bucket.
    """
    for candidate in gc.get_objects():
        if type(candidate).__module__.startswith("torch") and isinstance(
            candidate, DistributedDataParallel
        ):
            hooks: list[tuple[Any, Any]] = getattr(candidate, "_comm_hooks", [])
            if any(registered is state for _, registered in hooks):
                return candidate
    return None


def parameter_names(model: nn.Module) -> dict[int, tuple[str, torch.Size, torch.dtype]]:
    """Name (without DDP's prefix), shape and dtype of every trained parameter, by ``id``.

    The shape is that of the gradient in DDP's buckets: in memory order (channels-last weights have
    their channels last), a complex one as pairs of reals.
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    ignored: set[str] = set(getattr(model, "parameters_to_ignore", ()))
    ignored |= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    found: dict[int, tuple[str, torch.Size, torch.dtype]] = {}
    parameter: Tensor
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            found[id(parameter)] = (name, real.permute(memory_order(real)).shape, real.dtype)
    return found


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions, outermost in memory first; as they are if it has gaps or overlaps."""
    dimensions = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return dimensions
    strides = tensor.stride()
    order = tuple(sorted(dimensions, key=strides.__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else dimensions


def permuted(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The memory order of parameters whose dimensions do not lie in order, by name."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    found: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        order = memory_order(real)
        if order != tuple(range(real.dim())):
            found[name] = order
    return found
