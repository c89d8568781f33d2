"""Registers a scheme on FSDP2 modules: as their reduce-scatter, or between replicas (HSDP)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from commhooks._torch import DDPMeshInfo, fsdp2_is_in_backward, fsdp2_state
from commhooks.core.names import piece_name
from commhooks.core.scheme import Scheme
from commhooks.core.settings import check_seed
from commhooks.core.step_info import number_of
from commhooks.errors import HookNotAttachedError
from commhooks.hook.attachment import HostGuard
from commhooks.hook.handshake import MEETING
from commhooks.hook.sharded_host import fit_to_host
from commhooks.hook.sharded_parameters import OwnShards, ShardedParameters
from commhooks.hook.state import HookState
from commhooks.hosts.fsdp2 import BetweenNodes, Replacement, SchemeReduceScatter
from commhooks.hosts.fsdp2_checks import (
    need_between,
    need_free,
    replica_ranks,
    shard_ranks,
    warn_of_others,
)
from commhooks.hosts.fsdp2_model import FSDP2Model, groups_of
from commhooks.hosts.fsdp2_module import FSDP2Module
from commhooks.verify import Verification
from commhooks.wrappers.make import describe

__all__ = ["register_on_fsdp2"]


def register_on_fsdp2(
    model: nn.Module,
    scheme: str | Scheme,
    *,
    between: DeviceMesh | dist.ProcessGroup | None = None,
    seed: int = 0,
    history: int = 100_000,
    verification: Verification | None = None,
    **options: Any,
) -> HookState:
    """Registers a scheme on all FSDP2 modules of a model; see :func:`commhooks.register`.

    Args:
        between: replicas to average over after FSDP2 has reduced over its own ranks; None: the
            scheme replaces FSDP2's reduce-scatter.
        verification: how steps are verified; None: not at all.

    Raises:
        RegistrationError: the model or the scheme cannot run so; see ``fsdp2_checks``.
        MismatchError: the ranks differ.
    """
    need_between(between)
    found = FSDP2Model.of(model)
    warn_of_others(model, found)
    kinds: list[type[Replacement]] = [SchemeReduceScatter, BetweenNodes]
    kind, other_kind = kinds if between is None else reversed(kinds)
    need_free(found, kind)
    group = shard_ranks(found) if between is None else replica_ranks(found, between)

    if between is not None and found.ranks.size() > 1:
        # A hook of the shards may have the same seed, and its draws are in what is averaged here: a
        # dither has to be independent of its input.
        seed = number_of(f"{check_seed(seed)}/between") >> 1
    made = _maker(scheme, shards=between is None)
    hook = made(process_group=group, seed=seed, history=history, **options)
    shards = found.ranks
    known = ShardedParameters(found.parameters, shards.size())
    if between is not None and shards.size() > 1:
        known = OwnShards(found.parameters, shards.size(), shards.rank())
        hook._binding.shards = shards
    device = found.modules[0].group.device
    shards_for = "FSDP2" if between is None else ""
    values: Callable[[], Mapping[str, Tensor]] = dict  # no two ranks have the same shard
    if between is not None:
        rank = shards.rank() if shards.size() > 1 else None
        values = partial(_own_shards, list(map(weakref.ref, found.modules)), rank)
    fit_to_host(
        hook,
        model,
        known,
        group,
        device,
        shards_for=shards_for,
        verification=verification,
        values=values,
    )

    other = other_kind.hook_of(found.modules[0].group)
    hook._binding.beside = _other_nodes(found, other) if between is None else _other_shards(found)
    facts = {
        "host": f"FSDP2 {kind.place}",
        "other place": None if other is None else describe(other.scheme),
    }
    hook.agree("commhooks.register", facts, MEETING)
    if other is not None:
        inside, outside = (hook, other) if between is None else (other, hook)
        inside._binding.beside[:] = _other_nodes(found, outside)
        inside._runner.continue_in(outside._runner)

    for module in found.modules:
        setattr(module.group, kind.place, kind(hook, module, known))
    model.register_forward_pre_hook(_guard(model, hook, kind))
    return hook


def _own_shards(modules: list[weakref.ref[FSDP2Module]], rank: int | None) -> dict[str, Tensor]:
    """Returns this rank's shards of all parameters, by name.

    Args:
        rank: among those that have the other shards; None: there are no others.
    """
    # Held weakly: the modules hold the hook.
    found: dict[str, Tensor] = {}
    for one in modules:
        module = one()
        found |= {} if module is None else module.values()
    return found if rank is None else {piece_name(name, rank): one for name, one in found.items()}


def _guard(model: nn.Module, hook: HookState, kind: type[Replacement]) -> HostGuard:
    """Returns what checks before each forward pass that all modules still have the hook."""

    def has_hook(group: Any) -> bool:
        return kind.hook_of(group) is hook

    # Looked up once: a model may have thousands of modules.
    states = [fsdp2_state(one) for one in model.modules() if isinstance(one, FSDPModule)]
    need_ready = partial(_need_ready, states)
    return HostGuard(model, hook, groups_of(model), groups_of, has_hook, need_ready, _held)


def _held(model: nn.Module) -> list[Tensor]:
    """Returns the shards of a model, also where whole parameters are in their places."""
    groups = groups_of(model).values()
    return [one.sharded_param for group in groups for one in group.fsdp_params]


def _need_ready(states: list[Any]) -> None:
    """Raises if the last backward pass has raised, and FSDP2 takes the next one for a part of it.

    It would compute with parameters that it gathered before, and leave gradients unreduced.
    """
    if any(fsdp2_is_in_backward(state) for state in states):
        raise HookNotAttachedError(
            "commhooks: the last backward pass has raised, and FSDP2 is still in it: the gradients "
            "of the next one would be wrong. Call reset_iter_state() of the root FSDP2 module and "
            "zero_grad() on all ranks after such a pass; where this torch has no reset_iter_state, "
            "resume from a checkpoint"
        )


def _maker(scheme: str | Scheme, *, shards: bool) -> Callable[..., HookState]:
    """Returns what makes the hook.

    Args:
        shards: it runs as FSDP2's reduce-scatter.
    """
    if scheme == "auto":
        # By its name: it is a hook, so that its module is above this one.
        kind: Any = resolve_name("commhooks.auto:AutoHook")
        return partial(kind, shards_for="FSDP2" if shards else "")
    return partial(HookState, scheme)


# A loss scaler skips a step on all ranks, so a hook agrees also with ranks that have other parts of
# what it averages: one between nodes with the other shards, one within a node with the other nodes.


def _other_shards(found: FSDP2Model) -> list[dist.ProcessGroup]:
    """Returns the ranks that a hook between nodes agrees with besides its own."""
    return _of_several(found.ranks)


def _other_nodes(found: FSDP2Model, between: HookState | None) -> list[dist.ProcessGroup]:
    """Returns the ranks that a hook within nodes agrees with besides its own.

    Args:
        between: the hook between nodes; None: FSDP2 averages between them, if there are several.
    """
    if between is not None:
        return _of_several(between._binding.group())
    infos = [one.group.mesh_info for one in found.modules]
    native = [one.replicate_process_group for one in infos if isinstance(one, DDPMeshInfo)]
    return _of_several(*native[:1])


def _of_several(*groups: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    return [group for group in groups if group.size() > 1]
