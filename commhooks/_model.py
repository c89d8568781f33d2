"""Finds the DistributedDataParallel in what the user holds, and the names of its parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._errors import RegistrationError
from commhooks._memory import Layout

__all__ = ["Parameter", "Parameters", "ddp_models", "find_ddp", "find_owner"]


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
    for candidate in ddp_models():
        if any(registered is state for _, registered in candidate._comm_hooks):
            return candidate
    return None


def ddp_models() -> Iterator[DistributedDataParallel]:
    """All there are in this process. By type: ``isinstance`` would run properties of strangers."""
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), DistributedDataParallel):
            continue
        if hasattr(candidate, "module") and hasattr(candidate, "_comm_hooks"):  # is complete
            yield candidate


class Parameter(NamedTuple):
    """One trained parameter, as it lies in DDP's buckets.

    Attributes:
        shape: in memory order: channels-last weights have their channels last; a complex
            parameter is one of pairs of reals.
        order: which dimension of the parameter (``view_as_real`` of it) each one of ``shape`` is.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]


class Parameters:
    """The trained parameters of a model, by name and by identity.

    Args:
        model: DistributedDataParallel, whose prefix is left out of the names, or any module;
            None: no parameters.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._by_id = {} if model is None else dict(_trained(model))
        self._by_name = {parameter.name: parameter for parameter in self._by_id.values()}
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes, in memory order, by name."""
        return {parameter.name: parameter.shape for parameter in self}

    def layout(self, parameters: Sequence[Tensor]) -> Layout:
        """Names and shapes of a bucket's parameters.

        Raises:
            RegistrationError: one is not of this model.
        """
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            for parameter in parameters:
                if id(parameter) not in self._by_id:
                    raise RegistrationError(
                        f"the hook got a gradient of shape {tuple(parameter.shape)} that is not of "
                        f"the model it was made for: one HookState serves one model; make another"
                    )
            found = [self._by_id[i] for i in key]
            layout = Layout([one.name for one in found], [one.shape for one in found])
            self._layouts[key] = layout
        return layout

    def in_order(self, name: str, value: Tensor) -> Tensor:
        """A view of ``value``, which lies in memory order, with the parameter's own dimensions."""
        order = self._order(name, value)
        return value.permute([order.index(dimension) for dimension in range(len(order))])

    def in_memory_order(self, name: str, value: Tensor) -> Tensor:
        """A view of ``value``, which has the parameter's own dimensions, as it lies in buckets."""
        return value.permute(self._order(name, value))

    def _order(self, name: str, value: Tensor) -> tuple[int, ...]:
        known = self._by_name.get(name)
        if known is None or value.dim() != len(known.order):
            return tuple(range(value.dim()))
        return known.order


def _trained(model: nn.Module) -> Iterator[tuple[int, Parameter]]:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    ignored: set[str] = set(getattr(model, "parameters_to_ignore", ()))
    ignored |= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            order = _memory_order(real)
            yield id(parameter), Parameter(name, real.permute(order).shape, real.dtype, order)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions, outermost in memory first; as they are if it has gaps or overlaps."""
    dimensions = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return dimensions
    strides = tensor.stride()
    order = tuple(sorted(dimensions, key=strides.__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else dimensions
