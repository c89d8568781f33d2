"""Saves a ``HookState``, and loads a saved state completely or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks._version import __version__
from commhooks.checkpoint.checksum import checksum
from commhooks.checkpoint.form import (
    FORMAT,
    VERSION,
    MemoryDict,
    SavedBuckets,
    StateDict,
    rank_fields,
    read,
)
from commhooks.checkpoint.memory import check_complete, check_memory
from commhooks.checkpoint.pieces import whole_values
from commhooks.checkpoint.placement import stored_placement
from commhooks.checkpoint.ranks import (
    memory_for_rank,
    needed_ranks,
    parts_of_group,
    resizes_of,
    structure,
    with_own_pieces,
)
from commhooks.core.scheme import Scheme
from commhooks.core.slot import Slot
from commhooks.core.step_info import StepInfo
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook.gather import gather as gather_states
from commhooks.hook.gather import need_receiver
from commhooks.hook.resharding import (
    Kept,
    as_kept,
    as_saved,
    carried,
    needs_joining,
    resharded,
)
from commhooks.hook.running import Running
from commhooks.wrappers.feedback import RESIDUAL, FlushResidual, keeps_residual, without_flush
from commhooks.wrappers.make import describe
from ddp_core import MismatchError, MissingRankError

__all__ = ["Loaded", "needed_fields", "prepare", "save", "take_up"]

MakeInitial = Callable[[Slot, str, torch.Size, StepInfo], Tensor | None]


class Loaded(NamedTuple):
    """Holds a saved state that was checked and not applied yet."""

    scheme: Scheme
    memory: MemoryDict
    common: dict[str, Any]
    buckets: SavedBuckets


def save(hook: Running, gather: bool, to: int | None) -> dict[str, Any]:
    """Returns what ``HookState.state_dict`` returns."""
    if to is not None and not gather:
        raise ValueError(f"HookState.state_dict(to={to!r}): it goes with gather=True")
    # A fault is not raised at once: with ``gather`` it takes part in the handshake of all ranks.
    fault, hook._attendance.excused = None, True
    if hook._runner.under_way:
        fault = "a step is under way; call it after it"
    if hook._binding.knows_model or dist.is_initialized():
        hook._bind()
    if gather and (hook._engine.world_size > 1 or hook._binding.shards is not None):
        state = _own_state(hook) if fault is None else None
        with hook._binding.on_device():
            return _gathered(hook, state, fault, to)
    if fault is not None:
        raise RegistrationError(f"HookState.state_dict: {fault}")
    return _own_state(hook)


def _gathered(
    hook: Running, state: dict[str, Any] | None, fault: str | None, to: int | None
) -> dict[str, Any]:
    """Returns the states of all ranks of the hook's group, of whole parameters."""
    call, group = "HookState.state_dict(gather=True)", hook._binding.group()
    shards = hook._binding.shards
    if shards is None:
        return gather_states(call, state, fault, group, to)
    # First within a node, whose ranks have the shards, then between nodes. With ``to`` the first
    # rank of each node has the node's state, and the first of all has the whole.
    first = None if to is None else 0
    try:
        node = gather_states(call, state, fault, shards, first, also={"to, between nodes": to})
    except MissingRankError:
        raise
    except (MismatchError, RegistrationError) as error:
        if first in (None, shards.rank()):  # the other nodes would wait for this rank
            with suppress(MismatchError, RegistrationError):
                gather_states(call, None, str(error), group, to)
        raise
    need_receiver(call, to, group)
    if not node:
        return {}
    whole = _of_a_node(hook, node, dist.get_process_group_ranks(shards)[0])
    return gather_states(call, whole, None, group, to)


def _of_a_node(hook: Running, node: dict[str, Any], first: int) -> dict[str, Any]:
    """Returns the states of the shards of a node as that of one rank with whole parameters.

    Args:
        first: global rank of the first shard, whose part the result has.
    """
    memory: MemoryDict = {}
    for field in rank_fields(node):
        for key, values in node[field]["memory"].items():
            memory.setdefault(key, {}).update(values)
    shapes = hook._parameters.saved_shapes
    for key in memory.keys() & carried(hook, hook.scheme):
        memory[key] = whole_values(memory[key], shapes)
    common = {name: value for name, value in node.items() if not isinstance(value, dict)}
    part = {**node[f"rank{first}"], "memory": memory}
    del part["checksum"]
    return {**common, f"rank{first}": {**part, "checksum": checksum(common, part)}}


def _own_state(hook: Running) -> dict[str, Any]:
    rank, global_rank, leader = _places(hook)
    memory = _saved_memory(hook)
    buckets = hook._continuation.saved(hook._binding.core_telling(hook))
    # A pending flush shows in the memory. The saved scheme has to be equal on all ranks, and to
    # the scheme that the next run registers.
    scheme = without_flush(hook.scheme)
    common = {
        "format": FORMAT,
        "version": VERSION,
        "commhooks": __version__,
        "torch": str(torch.__version__),
        "scheme": describe(scheme),
        "structure": structure(scheme),
        "step": hook.step,
        "seed": hook._engine.seed,
        "world_size": max(hook._engine.world_size, 1),
        "layout": [list(names) for names in buckets.layout],
        "bucket_bytes": list(buckets.bucket_bytes),
        "plan": hook.saved_plan(),
    }
    part: dict[str, Any] = {
        "rank": rank,
        "global_rank": global_rank,
        "leader": leader,
        "arrival": None if buckets.arrival is None else list(buckets.arrival),
        "memory": memory,
    }
    if placement := stored_placement(hook._parameters.placement):
        part["placement"] = placement
    return {**common, f"rank{global_rank}": {**part, "checksum": checksum(common, part)}}


def _places(hook: Running) -> tuple[int, int, int]:
    """Returns the rank within the group, the rank within the job, and the group's smallest rank."""
    rank = max(hook._engine.rank, 0)
    if not dist.is_initialized():
        return rank, rank, 0
    try:
        ranks = dist.get_process_group_ranks(hook._binding.group())
    except (KeyError, ValueError, RuntimeError):  # torch.distributed does not know the group
        return rank, rank, 0
    return rank, ranks[rank], min(ranks)


def _saved_memory(hook: Running) -> MemoryDict:
    """Returns copies of all values by key and name, with initial ones where no step has been."""
    # Initial values too: ``dcp.load`` reads only the tensors that the template from ``state_dict``
    # has, and ``check_complete`` can then tell a lost value from an unused one.
    values = _declared(hook, hook.scheme, hook.step, _initial)
    for key, name, tensor in hook._engine.memory.items():
        values.setdefault(key, {})[name] = tensor.detach().clone()
    return as_saved(hook, hook.scheme, values)


def _declared(hook: Running, scheme: Scheme, step: int, make: MakeInitial) -> MemoryDict:
    """Returns the initial memory of a scheme by key and name, in the memory order of buckets."""
    values: MemoryDict = {}
    for name, shape, dtype, _ in hook._parameters:
        now = hook._engine.step_info(dtype, step)
        for slot in scheme.begins_with(name, shape, dtype, step):
            kept = slot.shape(shape)
            first = None if kept is None else make(slot, name, torch.Size(kept), now)
            if first is not None:
                values.setdefault(slot.key, {})[name] = first
    return values


def _initial(slot: Slot, name: str, shape: torch.Size, now: StepInfo) -> Tensor | None:
    return slot.initial(name, shape, now)


def _like_initial(slot: Slot, name: str, shape: torch.Size, now: StepInfo) -> Tensor | None:
    """Returns an initial value without memory, since its size may be a file's word."""
    small = slot.initial(name, torch.Size([1] * len(shape)), now)
    return None if small is None else small.new_empty(shape, device="meta")


# ---- loading


def prepare(
    hook: Running,
    state: StateDict | Sequence[StateDict],
    strict: bool,
    call: str,
    *,
    alone: bool = False,
) -> Loaded:
    """Checks a saved state and selects this rank's share of it; changes nothing.

    Args:
        alone: accepts the state of one rank on all ranks; missing parts count as empty.

    Raises:
        CheckpointError: the state is foreign, newer, incomplete, damaged or mismatching.
        RegistrationError: the call is in the middle of a step, or before
            ``init_process_group``.
    """
    if hook._runner.under_way:
        raise RegistrationError(f"{call}: a step is under way; load after it")
    if not dist.is_initialized():
        raise RegistrationError(
            f"{call}: rank and world size are needed to pick this rank's part: call "
            f"torch.distributed.init_process_group first"
        )
    hook._bind()
    engine, scheme = hook._engine, without_flush(hook.scheme)
    hook._attendance.excused = True
    # A compiled or wrapped model has other names than the plain one.
    saved = read(state, "load_state_dict").renamed(hook._parameters.find)
    common = saved.common
    fits = common["structure"] == structure(scheme)
    if not fits and strict:
        raise CheckpointError(
            f"load_state_dict: saved by {common['scheme']}, this hook runs {scheme}; register "
            f"that scheme and switch afterwards, or pass strict=False to keep the residual only"
        )
    if not fits:
        saved = saved.with_keys([RESIDUAL])
    saved = with_own_pieces(saved, hook._parameters.placement, hook._parameters.find)
    _, _, leader = _places(hook)
    saved, foreign = resharded(hook, scheme, saved, leader)
    resizes = resizes_of(scheme)
    # With the flush as well: states of earlier versions name it as a part of the scheme.
    same_settings = fits and common["scheme"] in (describe(scheme), describe(hook.scheme))
    # At the state's step, not the hook's: schedules keep other tensors at other steps.
    declared = _declared(hook, scheme, common["step"], _like_initial)
    declared = {key: values for key, values in declared.items() if key not in foreign}

    def check(memory: MemoryDict) -> None:
        # Shapes are compared in memory order, as parameters lie in buckets.
        memory = as_kept(hook, scheme, memory)
        keeper = scheme if keeps_residual(scheme) else FlushResidual(scheme)
        shapes = hook._parameters.shapes
        check_memory(memory, keeper, shapes, declared, same_settings=same_settings)
        if strict:
            check_complete(memory, scheme, resizes, declared, same_settings=same_settings)

    _, memory = memory_for_rank(
        saved, engine.rank, engine.world_size, resizes, leader=leader, alone=alone, check=check
    )
    # Copies: the caller may go on to use the tensors, or hand the same state to another hook.
    memory = {
        key: {n: v.detach().clone() for n, v in values.items()} for key, values in memory.items()
    }
    memory = as_kept(hook, scheme, memory)
    # Also on a rank that has nothing to flush, so that all ranks run the same scheme.
    if RESIDUAL in memory and not keeps_residual(scheme):
        scheme = FlushResidual(scheme)
    layout, limits = common["layout"], common.get("bucket_bytes", [])
    parts = parts_of_group(saved.parts, leader)
    # The order may differ between ranks; rank 0's decides, as in a run without a stop.
    arrival = parts[min(parts)].arrival
    return Loaded(scheme, memory, common, SavedBuckets(layout, limits, arrival))


def take_up(hook: Running, loaded: Loaded) -> None:
    """Applies a state that was checked."""
    engine = hook._engine
    engine.scheme = loaded.scheme
    engine.memory.load(loaded.memory)
    engine.step, engine.seed = loaded.common["step"], loaded.common["seed"]
    hook.ledger.rewind(engine.step)
    hook._take_up(loaded.buckets)
    hook._binding.pickled_on = None
    hook._agreed = False  # the next step compares what the ranks have loaded


def needed_fields(
    hook: Running, state: StateDict, shapes: Mapping[tuple[str, str, str], torch.Size]
) -> set[str]:
    """Returns the rank fields of a state that this rank has to read, before memory was read.

    Args:
        shapes: of all values, by rank field, key and name.
    """
    hook._bind()
    keys = {key for _, key, _ in shapes}
    # Which ranks are needed follows from the keys alone, so scalars stand in for the tensors.
    pretended = {key: {"": torch.zeros((), dtype=torch.float32, device="cpu")} for key in keys}
    parts = {field: state[field] for field in rank_fields(state)}
    seen = {
        field: {**part, "memory": pretended} if isinstance(part, Mapping) else part
        for field, part in parts.items()
    }
    saved = read({**state, **seen}, verify=False)
    names = {
        part.global_rank: [name for rank, _, name in shapes if rank == f"rank{part.global_rank}"]
        for part in saved.parts
    }
    placement, find = hook._parameters.placement, hook._parameters.find
    saved = with_own_pieces(saved, placement, find, names)
    leader, engine = _places(hook)[2], hook._engine
    leaders = {f"rank{part.global_rank}": part.leader for part in saved.parts}
    kept = [
        Kept(leaders[field], key, name, shape)
        for (field, key, name), shape in shapes.items()
        if field in leaders
    ]
    held = saved.parts  # a rank's pieces may be in the parts of several groups
    if not needs_joining(hook, hook.scheme, kept, leader):
        held = list(parts_of_group(saved.parts, leader).values())
    needed = needed_ranks(saved, engine.rank, engine.world_size, resizes_of(hook.scheme))
    # If no part in particular is needed, any part has the values that all ranks share.
    wanted = [part for part in held if part.rank in (needed or [held[0].rank])]
    return {f"rank{part.global_rank}" for part in wanted or held[:1]}
