"""Finds a model's DistributedDataParallel, and the names and shapes of its parameters."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commhooks._torch import (
    comm_hooks,
    knows_comm_hooks,
    logging_data,
    reducer_buckets,
    wrapped_parameters,
)
from commhooks.checkpoint._placement import ShardSpec, shard_spec_of
from commhooks.core._layout import Layout
from commhooks.core._names import is_padding, plain_name, plain_names
from commhooks.core._slot import Slot
from commhooks.errors import RegistrationError
from commhooks.wrappers._feedback import RESIDUAL
from ddp_core import DistributedDataParallel as CoreDDP
from ddp_core._torch import backward_number, ignored_names
from ddp_core.ddp._tensor_parallel import dtensor_spec

__all__ = [
    "Parameter",
    "Parameters",
    "ddp_models",
    "find_ddp",
    "find_owner",
    "memory_order",
    "names_of",
    "not_reduced",
    "reduced",
    "shared_buffers",
    "values_of",
]


def find_ddp(model: object) -> DistributedDataParallel:
    """Returns ``model`` itself, or the DistributedDataParallel inside it.

    Raises:
        RegistrationError: there is no DistributedDataParallel, or more than one.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        swapped = "; the model comes first, then the scheme" if isinstance(model, str) else ""
        raise RegistrationError(
            f"register(model, ...) takes a DistributedDataParallel module, got {kind}{swapped}"
        )
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise RegistrationError(
            f"register: {type(model).__name__} holds {len(inside)} DistributedDataParallel "
            f"modules; register a hook on each"
        )
    kinds = [base for module in model.modules() for base in type(module).__mro__]
    hosts = ("torch.distributed.fsdp", "torch.distributed._composable")
    if any(kind.__module__.startswith(hosts) for kind in kinds):
        raise RegistrationError(
            f"{type(model).__name__} reduces its gradients itself (FSDP or replicate()): "
            f"commhooks.register(model, scheme) takes it as it is, and this call needs a "
            f"DistributedDataParallel"
        )
    raise RegistrationError(
        f"register: {type(model).__name__} is not wrapped in DistributedDataParallel, so nothing "
        f"would call the hook: model = torch.nn.parallel.DistributedDataParallel(model) first; for "
        f"FSDP2, torch.distributed.fsdp.fully_shard(model) first"
    )


def find_owner(state: object) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel on which ``state`` was registered, or None.

    torch gives a hook its parameters but not its model. The look-up is made once, at the first
    bucket.
    """
    for candidate in ddp_models():
        if any(registered is state for _, registered in comm_hooks(candidate)):
            return candidate
    return None


def ddp_models() -> list[DistributedDataParallel]:
    """Returns all DistributedDataParallel modules of this process."""
    # A list, no generator: a generator that is not exhausted is in a circle with the list of all
    # objects, which has the generator, and keeps every tensor of the process until that is found.
    return [
        candidate
        for candidate in gc.get_objects()
        # By type: ``isinstance`` reads ``__class__``, which may be a property of any user's object.
        if type.__subclasscheck__(DistributedDataParallel, type(candidate))
        # A module whose constructor raised, or has not ended, lacks them.
        and hasattr(candidate, "module")
        and knows_comm_hooks(candidate)
    ]


class Parameter(NamedTuple):
    """Describes one parameter as it lies in DDP's buckets.

    Attributes:
        shape: sizes in memory order. Channels-last weights have their channels last; a complex
            parameter has pairs of reals.
        order: the parameter's dimensions (of ``view_as_real``, if it is complex) in the order of
            ``shape``.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    order: tuple[int, ...]


class Parameters:
    """Holds the parameters whose gradients are averaged, by name and by identity.

    Names are those of the model itself (:func:`plain_name`). The parameters are those that required
    a gradient when DistributedDataParallel was made or, in another module, that require one now.

    Args:
        model: DistributedDataParallel, whose prefix is left out of the names, or any module;
            None: no parameters.

    Attributes:
        cuts: shard of each parameter that this rank trains (tensor parallelism), by name.
        numel: number of entries of their gradients.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.cuts: dict[str, ShardSpec] = {}
        self._names = {} if model is None else _names_by_id(model)
        self._aliases = {} if model is None else _aliases(model, self._names)
        ignored = set() if model is None else _ignored(model)
        self._ignored = ignored | {plain_name(name) for name in ignored}
        # By ``id``, which is valid as long as the model holds its parameters.
        self._by_id: dict[int, Parameter] = {}
        self.numel = 0
        self._by_name: dict[str, Parameter] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        # Frozen parameters too: a state may have memory of a layer that was frozen since.
        for _, parameter in [] if model is None else _named(model):
            described = self._describe(parameter)
            self._by_name[described.name] = described
        for parameter in [] if model is None else _reduced(model):
            self._add(parameter)

    def _add(self, parameter: Tensor) -> None:
        if id(parameter) not in self._names:
            raise RegistrationError(
                f"the hook got a gradient of shape {tuple(parameter.shape)} that is not of the "
                f"model it was made for: one HookState serves one model; make another"
            )
        described = self._describe(parameter)
        self._by_id[id(parameter)] = self._by_name[described.name] = described
        self.numel += parameter.numel()

    def _describe(self, parameter: Tensor) -> Parameter:
        # A bucket holds gradients in the memory order of their parameters, and so do residuals,
        # which are added to them: otherwise every step would permute the bucket.
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        order = memory_order(real)
        name = self._names[id(parameter)]
        self.cuts[name] = shard_spec_of(dtensor_spec(parameter))
        shape = torch.Size(real.shape[dimension] for dimension in order)
        return Parameter(name, shape, real.dtype, order)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._by_id.values())

    @property
    def placement(self) -> dict[str, str]:
        """Returns this rank's shards of parameters that tensor parallelism cuts, by name."""
        return {name: cut.piece for name, cut in self.cuts.items() if cut.piece}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Returns the shapes in memory order, by name, of trained and of frozen parameters."""
        return {name: parameter.shape for name, parameter in self._by_name.items()}

    def __contains__(self, name: str) -> bool:
        """Whether the model has a parameter of this name: trained, frozen or ignored."""
        return name in self._by_name or name in self._ignored

    def name(self, parameter: Tensor) -> str | None:
        """Returns the name of a parameter, or None if the parameter is not averaged here."""
        known = self._by_id.get(id(parameter))
        return None if known is None else known.name

    def layout(self, parameters: Sequence[Tensor]) -> Layout:
        """Returns the names and shapes of a bucket's parameters.

        Raises:
            RegistrationError: a parameter is not of this model.
        """
        # Kept: the same buckets come in every step, and a new ``Layout`` hashes all names.
        key = tuple(map(id, parameters))
        layout = self._layouts.get(key)
        if layout is None:
            # Buckets hold what required a gradient when DistributedDataParallel was made. Within
            # backward torch cannot be asked for that (``_reduced``), so some may be new here.
            for parameter in parameters:
                if id(parameter) not in self._by_id:
                    self._add(parameter)
            known = [self._by_id[i] for i in key]
            layout = Layout([value.name for value in known], [value.shape for value in known])
            self._layouts[key] = layout
        return layout

    def find(self, name: str) -> str:
        """Returns this model's name of a parameter that a state has saved under another name."""
        if name in self._by_name:
            return name
        plain = self._aliases.get(plain_name(name), plain_name(name))
        return plain if plain in self._by_name else name

    def in_parameter_order(self, name: str, value: Tensor) -> Tensor:
        """Returns a view of ``value``, which is in memory order, in the parameter's dimensions."""
        order = self._order(name, value)
        return value.permute([order.index(dimension) for dimension in range(len(order))])

    def in_memory_order(self, name: str, value: Tensor) -> Tensor:
        """Returns a view of ``value``, which has the parameter's dimensions, in memory order."""
        return value.permute(self._order(name, value))

    def to_checkpoint_layout(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts values in the memory order of buckets to the parameters' own dimensions."""
        # In the parameter's own dimensions: a run with another memory format may load it.
        return {
            name: self.in_parameter_order(name, value).contiguous()
            for name, value in values.items()
        }

    def to_bucket_layout(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts a state's values from the parameters' own dimensions to memory order."""
        return {
            name: self.in_memory_order(name, value)
            for name, value in values.items()
            if not is_padding(name)
        }

    @property
    def saved_shapes(self) -> dict[str, torch.Size]:
        """Returns the shapes of whole parameters in their own dimensions, by name."""
        shapes = {}
        for name, parameter in self._by_name.items():
            order = parameter.order
            sizes = [parameter.shape[order.index(dim)] for dim in range(len(order))]
            shapes[name] = torch.Size(sizes)
        return shapes

    def is_portable(self, slot: Slot) -> bool:
        """Whether a slot is saved by whole parameter, so that any host can load it."""
        return slot.key == RESIDUAL

    def accepts_names(self, names: Collection[str]) -> bool:
        """Whether a state's values that are saved by shard belong to this rank's shards."""
        return all(name in self._by_name for name in names)

    def local_values(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns a state's values without those of other ranks' shards."""
        return {
            name: value
            for name, value in values.items()
            if name in self._by_name or not is_padding(name)
        }

    def _order(self, name: str, value: Tensor) -> tuple[int, ...]:
        # A loaded value may have any number of dimensions here; it is checked later.
        known = self._by_name.get(name)
        if known is None or value.dim() != len(known.order):
            return tuple(range(value.dim()))
        return known.order


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that DistributedDataParallel does not ignore, by name."""
    ignored = _ignored(model)
    named = _inner(model).named_parameters()
    return [(name, value) for name, value in named if name not in ignored]


def _ignored(model: nn.Module) -> set[str]:
    ignored: set[str] = set(getattr(model, "parameters_to_ignore", ()))
    return ignored | set(ignored_names(_inner(model)))


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _names_by_id(model: nn.Module) -> dict[int, str]:
    named = _named(model)
    plain = plain_names(name for name, _ in named)
    return {id(value): plain[name] for name, value in named}


def _aliases(model: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    """Returns the names of shared parameters by their other names."""
    every = _inner(model).named_parameters(remove_duplicate=False)
    pairs = [(plain_name(name), names[id(value)]) for name, value in every if id(value) in names]
    return {alias: name for alias, name in pairs if alias != name}


def reduced(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters in the model's buckets, by name."""
    within = set(map(id, _reduced(model)))
    return {name: value for name, value in _named(model) if id(value) in within}


def _reduced(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters in the model's buckets, in the order of their names."""
    # Not simply those that require a gradient: a layer may have been frozen, or set free, since
    # DistributedDataParallel was made, and stays in its bucket, or in none.
    named = [value for _, value in _named(model)]
    if not isinstance(model, DistributedDataParallel):
        return [value for value in named if value.requires_grad]
    if not isinstance(model, CoreDDP):
        # Nor those that are other objects by now.
        wrapped = set(map(id, wrapped_parameters(model)))
        named = [value for value in named if id(value) in wrapped]
    trained = [value for value in named if value.requires_grad]
    reducer: Any = getattr(model, "reducer", None)
    if isinstance(model, CoreDDP) and reducer is not None:
        reduced = {id(trainable.parameter) for trainable in reducer.parameters}
        return [value for value in named if id(value) in reduced]
    # The reducer holds its lock while it calls a hook: asking it within backward would never end.
    if backward_number() >= 0:
        return trained
    with contextlib.suppress(Exception):  # torch's class does not tell in every version and state
        if logging_data(model)["num_parameter_tensors"] != len(trained):
            # Only where the counts differ: this allocates the memory of all gradients once.
            buckets = reducer_buckets(reducer)
            reduced = {id(value) for bucket in buckets for value in bucket.parameters()}
            return [value for value in named if id(value) in reduced]
    return trained


def not_reduced(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are in no bucket, by name, without those that are ignored."""
    within = set(map(id, _reduced(model)))
    # Those that are other objects than at first raise by themselves (``KnownParameters``).
    return {
        name: value
        for name, value in _named(model)
        if id(value) not in within and _was_wrapped(model, value)
    }


def _was_wrapped(model: Any, parameter: Tensor) -> bool:
    """Whether a model had the parameter when it became a DistributedDataParallel."""
    if isinstance(model, CoreDDP):
        return model._ddp_state.known.knows(parameter)
    if isinstance(model, DistributedDataParallel):
        return any(parameter is known for known in wrapped_parameters(model))
    return True


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that all ranks have, frozen ones too, in full precision, by name.

    Within a backward pass of mixed precision, parameters are low-precision copies.
    """
    inner, full = _inner(model), {}
    if isinstance(model, CoreDDP) and model._ddp_state.precision is not None:
        full = model._ddp_state.precision.full_values()
    alone = set(ignored_names(inner))
    named = {name: parameter for name, parameter in inner.named_parameters() if name not in alone}
    plain = plain_names(named)
    return {plain[name]: full.get(id(parameter), parameter) for name, parameter in named.items()}


def shared_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that all ranks have, by name."""
    inner = _inner(model)
    alone = set(ignored_names(inner))
    return {name: buffer for name, buffer in inner.named_buffers() if name not in alone}


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the names of all parameters by identity."""
    named = dict(_inner(model).named_parameters())
    plain = plain_names(named)
    return {id(parameter): plain[name] for name, parameter in named.items()}


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Returns a tensor's dimensions, outermost in memory first; unsorted if it has gaps."""
    dimensions = tuple(range(tensor.dim()))
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return dimensions
    # The sort is stable: dimensions of size 1, which may have any stride, keep their places where
    # strides are equal. With gaps or overlaps a bucket is in row-major order, as in torch.
    strides = tensor.stride()
    order = tuple(sorted(dimensions, key=strides.__getitem__, reverse=True))
    return order if tensor.permute(order).is_contiguous() else dimensions
