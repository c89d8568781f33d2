"""Runs schemes in FSDP1 (``torch.distributed.fsdp.FullyShardedDataParallel``).

A unit of FSDP1 hands over one flat gradient, parameter after parameter, and needs the mean of this
rank's contiguous shard of it, which may begin anywhere within a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from commhooks._torch import (
    dtensor_specs_in,
    flat_masks,
    flat_names,
    flat_originals,
    flat_parameter,
    flat_shapes,
    fsdp1_hook,
    fsdp1_synchronises,
    is_in_fsdp1_backward,
    set_fsdp1_hook,
)
from commhooks.checkpoint._placement import ShardSpec, shard_spec_of
from commhooks.core._layout import Layout, equal_shards
from commhooks.core._names import is_padding, padding_name, plain_name
from commhooks.core._scheme import Scheme
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.fsdp._configure import configure_sharded_hook
from commhooks.hook._attachment import HostGuard
from commhooks.hook._exchanges import HookBucket
from commhooks.hook._handshake import HANDSHAKE_LIMIT
from commhooks.hook._parameters import Parameter, memory_order
from commhooks.hook._sharded import FlatParameters
from commhooks.hook._state import HookState
from commhooks.verify import Verification
from ddp_core.reducer._autograd import (
    NO_BACKWARD,
    backward_number,
    call_after_backward,
    when_accumulated,
)
from ddp_core.reducer._misuse import local_error

__all__ = ["cuts_in", "originals", "pieces", "register_on_fsdp1"]


def pieces(name: str, unit: Any, ranks: int) -> list[tuple[Parameter, bool]]:
    """Returns the parameters and padding of a unit's flat gradient, and whether each is trained."""
    flat, prefix = flat_parameter(unit), _prefix(name)
    names = _names(name, flat)
    values = flat_originals(flat) or [flat] * len(names)
    # A parameter lies there as in its own memory: channels-last weights have their channels last.
    orders = [
        memory_order(torch.empty_strided(shape, stride, device="meta"))
        for shape, stride in flat_shapes(flat)
    ]
    shapes = [shape for shape, _ in flat_shapes(flat)]
    named = zip(names, shapes, values, orders, strict=True)
    entries = [
        (padding_name(f"{prefix}{place}"), torch.Size([numel]), flat, (0,))
        if padded
        else next(named)
        for place, (numel, padded) in enumerate(flat_masks(flat))
    ]
    total = sum(shape.numel() for _, shape, *_ in entries)
    entries.append((padding_name(f"{prefix}end"), torch.Size([-total % ranks]), flat, (0,)))
    return [
        (Parameter(name_here, _sizes(shape, order), flat.dtype, order), value.requires_grad)
        for name_here, shape, value, order in entries
    ]


def cuts_in(name: str, unit: Any) -> dict[str, ShardSpec]:
    """Returns the tensor-parallel shard specs of the parameters in a unit's flat gradient."""
    flat = flat_parameter(unit)
    # FSDP1 keeps what a DTensor was; another extension than torch's own may keep anything.
    named_specs = zip(_names(name, flat), dtensor_specs_in(flat), strict=True)
    return {
        parameter_name: shard_spec_of(spec)
        for parameter_name, spec in named_specs
        if hasattr(spec, "placements")
    }


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _names(name: str, flat: Any) -> list[str]:
    return [plain_name(f"{_prefix(name)}{local}") for local in flat_names(flat)]


def _sizes(shape: torch.Size, order: tuple[int, ...]) -> torch.Size:
    return torch.Size(shape[dimension] for dimension in order)


def originals(unit: Any, layout: Layout) -> dict[str, Tensor]:
    """Returns the parameters in a flat gradient, by name; none if only the whole is known."""
    names = [name for name in layout.names if not is_padding(name)]
    return dict(zip(names, flat_originals(flat_parameter(unit)), strict=False))


def register_on_fsdp1(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    seed: int = 0,
    history: int = 100_000,
    verification: Verification | None = None,
    **options: Any,
) -> HookState:
    """Registers a scheme on all units of an FSDP1 model; see :func:`commhooks.register`."""
    units = _units(model)
    group = _group(list(units.values()))
    hook = HookState(scheme, process_group=group, seed=seed, history=history, **options)
    ranks = {name: 1 if _is_whole(unit) else group.size() for name, unit in units.items()}
    known = FlatParameters([pieces(name, unit, ranks[name]) for name, unit in units.items()])
    for name, unit in units.items():
        known.cuts |= cuts_in(name, unit)
    device = next(iter(units.values())).compute_device
    shards_for = "FSDP1" if max(ranks.values()) > 1 else ""
    configure_sharded_hook(
        hook, model, known, group, device, shards_for=shards_for, verification=verification
    )
    hook.agree("commhooks.register", {"host": "FSDP1"}, HANDSHAKE_LIMIT)
    for number, (unit, layout) in enumerate(zip(units.values(), known.layouts, strict=True)):
        # As FSDP1's own register_comm_hook, which gives all units one state: a hook could not
        # tell which unit it is called for.
        parameters = originals(unit, layout)
        monitor = _WholeUnitMonitor(unit, parameters) if _is_whole(unit) else None
        set_fsdp1_hook(unit, reduce_unit, (hook, number, layout, parameters, monitor))

    def has_hook(unit: Any) -> bool:
        present, state = fsdp1_hook(unit)
        return present is reduce_unit and state[0] is hook

    check_ready = partial(_check_ready, FullyShardedDataParallel.fsdp_modules(model))
    model.register_forward_pre_hook(
        HostGuard(model, hook, units, _units, has_hook, check_ready, _held)
    )
    return hook


class _WholeUnitMonitor:
    """Raises if a loss was computed without the forward pass of a unit with whole parameters.

    In a forward pass of the unit autograd sees views of its flat parameter. Its parameters get
    gradients of their own only outside of that pass: of a penalty on weights, in a backward pass in
    which the hook runs as well, or of a loss, in a pass without the hook. (Sharded parameters are
    no matrices outside of their unit, so no loss can use them.)
    """

    def __init__(self, unit: Any, parameters: Mapping[str, Tensor]) -> None:
        self._unit = weakref.ref(unit)
        self.hook_ran_in = self._callback_in = NO_BACKWARD
        for name, parameter in parameters.items():
            when_accumulated(parameter, partial(self._on_gradient, name))

    def _on_gradient(self, name: str, _: Tensor) -> None:
        if self._callback_in != backward_number():
            self._callback_in = backward_number()
            call_after_backward(partial(self._pass_ended, name, self._callback_in))

    def _pass_ended(self, name: str, number: int) -> None:
        unit = self._unit()
        if number != self.hook_ran_in and unit is not None and fsdp1_synchronises(unit):
            landed = self.hook_ran_in != NO_BACKWARD
            raise HookNotAttachedError(local_error(name, landed, "FullyShardedDataParallel"))


def _held(model: nn.Module) -> list[Tensor]:
    """Returns the parameters that a model has between steps, also if FSDP1 has taken them out."""
    flat = [flat_parameter(unit) for unit in _units(model).values()]
    return [*flat, *(original for each in flat for original in flat_originals(each))]


def _check_ready(units: list[Any]) -> None:
    """Raises if the last backward pass raised, so that FSDP1 takes the next pass for a part of it.

    The gradients of the next pass would be wrong, and FSDP1 has no method that resets its state.
    """
    if any(is_in_fsdp1_backward(unit) for unit in units):
        raise HookNotAttachedError(
            "commhooks: the last backward pass has raised, and FSDP1 is still in it: the gradients "
            "of the next one would be wrong. End the processes and resume from a checkpoint; FSDP2 "
            "(fully_shard) has reset_iter_state()"
        )


def reduce_unit(
    state: tuple[HookState, int, Layout, dict[str, Tensor], _WholeUnitMonitor | None],
    gradient: Tensor,
    *shard: Tensor,
) -> None:
    """Averages the gradient of one unit: FSDP1's hook in both of its signatures.

    Args:
        state: the hook, the unit's number, layout and parameters, and the unit's monitor.
        gradient: the whole flat gradient, padded where it is sharded; takes the mean if it is not.
        shard: takes the mean of this rank's shard; missing where nothing is sharded.
    """
    hook, number, layout, parameters, monitor = state
    if monitor is not None:
        monitor.hook_ran_in = backward_number()
    bucket = HookBucket(number, gradient, layout, is_blocking=True)
    if shard:
        parts = equal_shards(gradient.numel(), gradient.numel() // shard[0].numel())
        bucket.shards, bucket.output, bucket.dense_sends = parts, shard[0], 1.0
    # Frozen parameters in a trained unit (use_orig_params): their entries are zeros, and unused.
    bucket.frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    hook.start(bucket).wait()


def _units(model: nn.Module) -> dict[str, Any]:
    """Returns the units with parameters, by name."""
    modules: dict[str, Any] = dict(model.named_modules())
    return {
        name: module
        for name, module in modules.items()
        if isinstance(module, FullyShardedDataParallel) and flat_parameter(module) is not None
    }


def _is_whole(unit: Any) -> bool:
    return bool(unit.sharding_strategy.name == "NO_SHARD")


def _group(units: list[Any]) -> Any:
    """Returns the ranks that all units reduce over; raises if they take no hook."""
    for unit in units:
        if "HYBRID" in unit.sharding_strategy.name:
            raise RegistrationError(
                f"register: FSDP1 takes no hook with {unit.sharding_strategy}; use FSDP2 "
                f"(fully_shard) and register(model, scheme, replicate_group=...)"
            )
        if fsdp1_hook(unit)[0] is not None:
            raise RegistrationError("register: this model already has a hook, and FSDP1 takes one")
    if not units:
        raise RegistrationError("register: no unit of this FSDP1 model has parameters")
    if any(unit.process_group is not units[0].process_group for unit in units):
        raise RegistrationError(
            "register: the units of this FSDP1 model reduce over different process groups; "
            "register each of them separately"
        )
    return units[0].process_group
