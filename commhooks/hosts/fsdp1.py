"""Runs schemes in FSDP1 (``torch.distributed.fsdp.FullyShardedDataParallel``).

A unit of FSDP1 hands over one flat gradient, parameter after parameter, and needs the mean of this
rank's contiguous shard of it, which may begin anywhere within a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from commhooks.checkpoint.names import is_padding, padding_name, plain_name
from commhooks.core.layout import Layout
from commhooks.core.scheme import Scheme
from commhooks.core.shards import equal_shards
from commhooks.errors import HookNotAttachedError, RegistrationError
from commhooks.hook.handshake import MEETING
from commhooks.hook.parameters import Parameter, Parameters
from commhooks.hook.sharded_bucket import ShardedBucket, need_shards
from commhooks.hook.state import HookState

__all__ = ["register_on_fsdp1"]


class FlatParameters(Parameters):
    """Holds the parameters of all units, and the padding between them."""

    def __init__(self, units: Sequence[tuple[str, Any]], world_size: int) -> None:
        super().__init__()
        self.layouts = [self._layout(prefix, unit, world_size) for prefix, unit in units]

    def _layout(self, prefix: str, unit: Any, world_size: int) -> Layout:
        shapes, names, found = iter(unit._shapes), iter(unit._fqns), []
        sizes = zip(unit._numels_with_padding, unit._is_padding_mask, strict=True)
        for place, (numel, padded) in enumerate(sizes):
            shape = torch.Size([numel]) if padded else next(shapes)
            own = (
                padding_name(f"{prefix}{place}") if padded else plain_name(f"{prefix}{next(names)}")
            )
            found.append((own, shape))
        total = sum(shape.numel() for _, shape in found)
        found.append((padding_name(f"{prefix}end"), torch.Size([-total % world_size])))
        for name, shape in found:
            order = tuple(range(len(shape)))
            self._by_name[name] = Parameter(name, shape, unit.dtype, order)
        return Layout([name for name, _ in found], [shape for _, shape in found])

    def __iter__(self) -> Any:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def as_saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(values)

    def as_kept(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: value for name, value in values.items() if not is_padding(name)}
        for name, piece in self._by_name.items():
            if is_padding(name):
                saved = values.get(name)
                fits = saved is not None and saved.shape == piece.shape
                kept[name] = saved if fits and saved is not None else _zeros(piece)
        return kept


def _zeros(piece: Parameter) -> Tensor:
    return torch.zeros(piece.shape, dtype=torch.float32, device="cpu")


def reduce_unit(state: tuple[HookState, int, Layout], gradient: Tensor, *shard: Tensor) -> None:
    """Averages the gradient of one unit: FSDP1's hook in both of its signatures.

    Args:
        state: the hook, the unit's number and its layout.
        gradient: the whole flat gradient, padded where it is sharded; takes the mean if it is not.
        shard: takes the mean of this rank's shard; missing where nothing is sharded.
    """
    hook, number, layout = state
    if shard:
        parts = equal_shards(gradient.numel(), gradient.numel() // shard[0].numel())
        bucket = ShardedBucket(number, gradient, layout, parts, shard[0])
    else:
        bucket = ShardedBucket(number, gradient, layout)
    into = shard[0] if shard else gradient
    mean: Tensor = hook.start(bucket).wait()
    if mean.data_ptr() != into.data_ptr():
        into.copy_(mean)


class _Guard:
    """Tells a hook when a forward pass begins, once it is known to be installed still."""

    def __init__(self, hook: HookState, units: Sequence[Any]) -> None:
        self._hook, self._units = hook, units

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if any(unit._comm_hook is not reduce_unit for unit in self._units):
            raise HookNotAttachedError(
                f"commhooks: {self._hook} would not run: a unit of FSDP1 has another hook"
            )
        self._hook.forward_begins()


def register_on_fsdp1(
    model: nn.Module, scheme: str | Scheme, *, seed: int = 0, history: int = 100_000, **options: Any
) -> HookState:
    """Registers a scheme on all units of an FSDP1 model; see :func:`commhooks.register`."""
    modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    units = [one for one in modules if one._handle is not None]
    for one in units:
        if "HYBRID" in one.sharding_strategy.name:
            raise RegistrationError(
                f"register: FSDP1 takes no hook with {one.sharding_strategy}; use FSDP2 "
                f"(fully_shard) and register(model, scheme, between=...)"
            )
        if one._comm_hook is not None:
            raise RegistrationError("register: this model already has a hook, and FSDP1 takes one")
    if not units:
        raise RegistrationError("register: no unit of this FSDP1 model has parameters")
    group: Any = units[0].process_group
    hook = HookState(scheme, process_group=group, seed=seed, history=history, **options)
    whole = all(one.sharding_strategy.name == "NO_SHARD" for one in units)
    if not whole:
        need_shards(hook.scheme, "FSDP1")
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    flats = [(prefixes[id(one)], one._handle.flat_param) for one in units]
    known = FlatParameters(flats, 1 if whole else group.size())
    hook._binding.adopt_sharded(model, known, group)
    hook._attendance.dismiss()  # the guard says where it would not run
    hook.stays = "its host decides over which ranks it shards; register a hook on a model of others"
    hook.agree("commhooks.register", {"host": "FSDP1"}, MEETING)
    for number, (one, layout) in enumerate(zip(units, known.layouts, strict=True)):
        # As FSDP1's own register_comm_hook, which gives all units one state: a hook could not
        # tell which unit it is called for.
        one._comm_hook, one._comm_hook_state = reduce_unit, (hook, number, layout)
    model.register_forward_pre_hook(_Guard(hook, units))
    return hook
