"""Saves a ``HookState``, and loads a saved state completely or not at all."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks._torch import device_of_objects
from commhooks._version import __version__
from commhooks.checkpoint._format import (
    FORMAT,
    VERSION,
    MemoryDict,
    Saved,
    SavedBuckets,
    StateDict,
    checksum,
    rank_fields,
    read,
)
from commhooks.checkpoint._memory import check_complete, check_memory
from commhooks.checkpoint._pieces import join_shards, merge_shard_groups
from commhooks.checkpoint._placement import stored_placement
from commhooks.checkpoint._ranks import (
    memory_for_rank,
    needed_ranks,
    parts_of_group,
    resizes_of,
    structure,
    with_local_shards,
)
from commhooks.core._names import is_padding, parameter_name, split_shard_name
from commhooks.core._scheme import Scheme, slots_of
from commhooks.core._slot import Slot, StepInfo
from commhooks.core._user_line import user_stacklevel
from commhooks.errors import CheckpointError, RegistrationError
from commhooks.hook._handshake import handshake
from commhooks.hook._running import CLOSED, Running
from commhooks.wrappers._feedback import (
    RESIDUAL,
    RESIDUAL_SLOT,
    FlushResidual,
    keeps_residual,
    unwrap_flush,
)
from commhooks.wrappers._make import as_typed, describe, short_repr
from ddp_core import MismatchError, MissingRankError
from ddp_core.exchange._devices import as_bytes
from ddp_core.exchange._errors import listed

__all__ = [
    "Loaded",
    "SavedValue",
    "apply",
    "check_receiver",
    "gather_states",
    "needed_fields",
    "needs_reshard",
    "portable_keys",
    "prepare",
    "resharded",
    "save",
    "to_bucket_layout",
    "to_checkpoint_layout",
    "without_start",
]


# ---- parameters of other shapes


class SavedValue(NamedTuple):
    """Describes one value of a saved state; ``leader`` identifies its group of ranks."""

    leader: int
    key: str
    name: str
    shape: torch.Size


def portable_keys(hook: Running, scheme: Scheme) -> set[str]:
    """Returns the keys that are saved by whole parameter, so that any host can load them."""
    # A residual of any scheme: it may be flushed.
    slots = (RESIDUAL_SLOT, *slots_of(scheme))
    return {slot.key for slot in slots if hook.parameters.is_portable(slot)}


def to_checkpoint_layout(hook: Running, scheme: Scheme, memory: MemoryDict) -> MemoryDict:
    """Converts memory from the layout of buckets to that of checkpoints."""
    whole, known = portable_keys(hook, scheme), hook.parameters
    return {
        key: known.to_checkpoint_layout(values) if key in whole else values
        for key, values in memory.items()
    }


def to_bucket_layout(hook: Running, scheme: Scheme, memory: MemoryDict) -> MemoryDict:
    """Converts the memory of a checkpoint to the layout of this rank's buckets."""
    whole, known = portable_keys(hook, scheme), hook.parameters
    return {
        key: known.to_bucket_layout(values) if key in whole else known.local_values(values)
        for key, values in memory.items()
    }


def needs_reshard(hook: Running, scheme: Scheme, values: Iterable[SavedValue], leader: int) -> bool:
    """Whether a state has shards of parameters that are cut differently here.

    Args:
        values: descriptions of all values of the state.
        leader: the smallest global rank of the hook's group.
    """
    whole, here = portable_keys(hook, scheme), hook.parameters.shapes
    # A hook within nodes knows pieces of these names, too, but saves and loads whole parameters.
    if hook.target.shards is None:
        here = {}
    pieces = [
        piece
        for piece in values
        if piece.key in whole and split_shard_name(piece.name)[1] is not None
    ]
    if len({piece.leader for piece in pieces}) > 1:
        of_group = [piece for piece in pieces if piece.leader == leader]
    else:
        of_group = pieces
    return bool(pieces) and not (
        of_group and all(here.get(piece.name) == piece.shape for piece in of_group)
    )


def resharded(hook: Running, scheme: Scheme, saved: Saved, leader: int) -> tuple[Saved, set[str]]:
    """Returns a state of whole parameters or of this rank's shards, and the keys that are dropped.

    A value that is not shaped as its parameter (a factor, packed bytes) belongs to one shard. With
    other shards it is of no use, and is dropped with a warning.

    Args:
        leader: the smallest global rank of the hook's group.

    Raises:
        CheckpointError: pieces are missing.
    """
    known, whole = hook.parameters, portable_keys(hook, scheme)
    saved_values = (
        SavedValue(part.leader, key, name, value.shape)
        for part in saved.parts
        for key, values in part.memory.items()
        for name, value in values.items()
    )
    if needs_reshard(hook, scheme, saved_values, leader):
        saved = merge_shard_groups(saved, known.saved_shapes, whole)
    here = set(map(parameter_name, known.shapes))
    names: dict[str, set[str]] = {}
    for part in parts_of_group(saved.parts, leader).values():
        for key in part.memory.keys() - whole:
            saved_names = {name for name in part.memory[key] if not is_padding(name)}
            names.setdefault(key, set()).update(saved_names)
    foreign = {
        key
        for key, saved_names in names.items()
        if not known.accepts_names(saved_names) and set(map(parameter_name, saved_names)) <= here
    }
    if foreign:
        _warn_foreign(hook, sorted(foreign))
        keys = {key for part in saved.parts for key in part.memory}
        saved = saved.with_keys(sorted(keys - foreign))
    return saved, foreign


def _warn_foreign(hook: Running, foreign: list[str]) -> None:
    if hook.engine.rank == 0:
        warnings.warn(
            f"commhooks: the state was saved on another mesh or in another integration, where "
            f"{foreign} belonged to other shards of the parameters and is dropped. Residuals, "
            f"momenta and all else "
            f"that is shaped as the parameters is carried over",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


# ---- states of all ranks


# Bytes per message. A rank then needs one buffer of this size besides the states, and not a second
# copy of the largest residual on the device.
_MESSAGE = 1 << 26
_Spec = tuple[str, str, torch.dtype, torch.Size]  # key, parameter name


def gather_states(
    call: str,
    state: Mapping[str, Any] | None,
    fault: str | None,
    group: dist.ProcessGroup,
    dst: int | None,
    *,
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the states of all ranks of ``group`` as one, on the CPU; all ranks call it.

    Small tensors share a message, large tensors are cut; nothing is padded.

    Args:
        call: the name of the public call, for messages.
        state: this rank's state, with one part; None if this rank cannot save.
        fault: the reason why it cannot.
        dst: the only rank that gets the gathered state; the others get an empty dict.
        also: further facts that must be the same on all ranks, by name.

    Raises:
        MismatchError: the ranks are not at the same step, or some of them cannot save.
        RegistrationError: no rank can save.
    """
    common = {} if state is None else {k: v for k, v in state.items() if not isinstance(v, dict)}
    # A fault takes part in the handshake instead of raising before it: the other ranks would wait.
    facts = {"what keeps it from saving": fault, "dst": dst, **(also or {})}
    handshake(call, {**facts, **common}, group)
    if state is None:
        raise RegistrationError(f"{call}: {fault}")
    # After the handshake all ranks have the same ``dst``, so all raise.
    check_receiver(call, dst, group)

    # Gather fields, names and shapes.
    (field,) = (key for key in state if key not in common)
    part = state[field]
    tensors = [
        (key, name, value)
        for key, values in part["memory"].items()
        for name, value in values.items()
    ]
    specs: list[_Spec] = [(key, name, value.dtype, value.shape) for key, name, value in tensors]
    about = (
        field,
        {key: value for key, value in part.items() if key != "memory"},
        list(part["memory"]),  # keys without values, which ``specs`` does not show
        specs,
    )
    # Shapes as objects, values as bytes: pickling the tensors would hold all ranks' memory several
    # times on every rank, also where only one rank wants it.
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, about, group=group)

    # Send the values, rank after rank.
    whole = dict(common)
    for source, (source_field, fields, keys, source_specs) in enumerate(everyone):
        values_here = [value for _, _, value in tensors] if source == group.rank() else None
        # On every rank, in the same order.
        arrived = _send(source_specs, values_here, source, dst, group)
        if dst not in (None, group.rank()):
            continue
        memory: dict[str, dict[str, Tensor]] = {key: {} for key in keys}
        for (key, name, _, _), value in zip(source_specs, arrived, strict=True):
            memory[key][name] = value
        whole[source_field] = {**fields, "memory": memory}
    return whole if dst in (None, group.rank()) else {}


def check_receiver(call: str, dst: int | None, group: dist.ProcessGroup) -> None:
    """Raises ValueError unless ``dst`` is a rank of ``group``, or None."""
    if dst is not None and not (type(dst) is int and 0 <= dst < group.size()):
        raise ValueError(
            f"{call}: dst=... is a rank of the hook's {group.size()}, or None for all, got {dst!r}"
        )


def _send(
    specs: Sequence[_Spec],
    to_send: Sequence[Tensor] | None,
    source: int,
    dst: int | None,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Sends the tensors of rank ``source`` and returns them, on the CPU, where they are received.

    Args:
        specs: dtypes and shapes of the tensors.
        to_send: the tensors, on rank ``source``; None on the others.
    """
    # NCCL sends tensors of a GPU only, so a message goes through the group's device.
    rank, device = group.rank(), device_of_objects(group)
    receives = to_send is None and dst in (None, rank)
    flat: list[Tensor] = []
    if to_send is not None:
        # As bytes: tensors of different dtypes share a message, and no backend sees the dtype.
        flat = [as_bytes(value.detach()) for value in to_send]
        values = [value.detach().cpu() for value in to_send]
    elif receives:
        values = [torch.empty(shape, dtype=dtype, device="cpu") for _, _, dtype, shape in specs]
        flat = [value.view(-1).view(torch.uint8) for value in values]
    else:
        values = []
    if dst == source or not (receives or to_send is not None):
        return values
    sizes = [dtype.itemsize * shape.numel() for _, _, dtype, shape in specs]
    for spans in _messages(sizes):
        total = sum(end - begin for _, begin, end in spans)
        if to_send is not None:
            buffer = torch.cat([flat[index][begin:end].to(device) for index, begin, end in spans])
        else:
            buffer = torch.empty(total, dtype=torch.uint8, device=device)
        if dst is None:
            dist.broadcast(buffer, group=group, group_src=source)
        elif to_send is not None:
            dist.send(buffer, group=group, group_dst=dst)
        else:
            dist.recv(buffer, group=group, group_src=source)
        if receives:
            pieces = buffer.cpu().split([end - begin for _, begin, end in spans])
            for (index, begin, end), piece in zip(spans, pieces, strict=True):
                flat[index][begin:end] = piece
    return values


def _messages(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields the messages, each a list of (tensor, begin, end) in bytes, in order."""
    spans: list[tuple[int, int, int]] = []
    room = _MESSAGE
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            spans.append((index, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield spans
                spans, room = [], _MESSAGE
    if spans:
        yield spans


# ---- saving and loading


MakeInitial = Callable[[Slot, str, torch.Size, StepInfo], Tensor | None]


class Loaded(NamedTuple):
    """Holds a saved state that was checked, and is not applied yet."""

    scheme: Scheme
    memory: MemoryDict
    common: dict[str, Any]
    buckets: SavedBuckets


def save(hook: Running, gather: bool, dst: int | None) -> dict[str, Any]:
    """Implements ``HookState.state_dict``."""
    if dst is not None and not gather:
        raise ValueError(
            f"HookState.state_dict(dst={dst!r}): it goes with gather=True, without which each rank "
            f"keeps its own state"
        )
    # A fault is not raised at once: with ``gather`` it takes part in the handshake of all ranks.
    fault, hook.call_monitor.suppressed = None, True
    if hook.runner.under_way:
        fault = "a step is under way; call it after it"
    if hook.target.knows_model or dist.is_initialized():
        hook.bind()
    if gather and (hook.engine.world_size > 1 or hook.target.shards is not None):
        state = _own_state(hook) if fault is None else None
        with hook.target.on_device():
            return _gathered(hook, state, fault, dst)
    if fault is not None:
        raise RegistrationError(f"HookState.state_dict: {fault}")
    return _own_state(hook)


def _gathered(
    hook: Running, state: dict[str, Any] | None, fault: str | None, dst: int | None
) -> dict[str, Any]:
    """Gathers the states of all ranks as one, of whole parameters."""
    call, group = "HookState.state_dict(gather=True)", hook.target.group()
    shards = hook.target.shards
    if shards is None:
        return gather_states(call, state, fault, group, dst)
    # First within a node, whose ranks have the shards, then between nodes. With ``dst`` the first
    # rank of each node has the node's state, and the first of all has the whole.
    first = None if dst is None else 0
    try:
        node = gather_states(call, state, fault, shards, first, also={"dst, between nodes": dst})
    except MissingRankError:
        raise
    except (MismatchError, RegistrationError) as error:
        if first in (None, shards.rank()):  # the other nodes would wait for this rank
            with suppress(MismatchError, RegistrationError):
                gather_states(call, None, str(error), group, dst)
        raise
    check_receiver(call, dst, group)
    if not node:
        return {}
    whole = _of_a_node(hook, node, dist.get_process_group_ranks(shards)[0])
    return gather_states(call, whole, None, group, dst)


def _of_a_node(hook: Running, node: dict[str, Any], first: int) -> dict[str, Any]:
    """Joins the states of a node's shards to the state of one rank with whole parameters.

    Args:
        first: global rank of the first shard; the result is the part of this rank.
    """
    memory: MemoryDict = {}
    for field in rank_fields(node):
        for key, values in node[field]["memory"].items():
            memory.setdefault(key, {}).update(values)
    shapes = hook.parameters.saved_shapes
    for key in memory.keys() & portable_keys(hook, hook.scheme):
        memory[key] = join_shards(memory[key], shapes)
    common = {name: value for name, value in node.items() if not isinstance(value, dict)}
    part = {**node[f"rank{first}"], "memory": memory}
    del part["checksum"]
    return {**common, f"rank{first}": {**part, "checksum": checksum(common, part)}}


def _own_state(hook: Running) -> dict[str, Any]:
    rank, global_rank, leader = _rank_ids(hook)
    memory = _saved_memory(hook)
    buckets = hook.continuation.saved(hook.target.notifying_core(hook))
    # A pending flush shows in the memory. The saved scheme has to be equal on all ranks, and to
    # the scheme that the next run registers.
    scheme = unwrap_flush(hook.scheme)
    common = {
        "format": FORMAT,
        "version": VERSION,
        "commhooks": __version__,
        "torch": str(torch.__version__),
        "scheme": describe(scheme),
        "structure": structure(scheme),
        "step": hook.step,
        "seed": hook.engine.seed,
        "world_size": max(hook.engine.world_size, 1),
        "layout": [list(names) for names in buckets.layout],
        "bucket_bytes": list(buckets.bucket_bytes),
        "plan": hook.plan_state(),
    }
    part: dict[str, Any] = {
        "rank": rank,
        "global_rank": global_rank,
        "leader": leader,
        "arrival": None if buckets.arrival is None else list(buckets.arrival),
        "memory": memory,
    }
    if placement := stored_placement(hook.parameters.placement):
        part["placement"] = placement
    return {**common, f"rank{global_rank}": {**part, "checksum": checksum(common, part)}}


def _rank_ids(hook: Running) -> tuple[int, int, int]:
    """Returns the rank within the group, the rank within the job, and the group's smallest rank."""
    rank = max(hook.engine.rank, 0)
    if not dist.is_initialized():
        return rank, rank, 0
    try:
        ranks = dist.get_process_group_ranks(hook.target.group())
    except (KeyError, ValueError, RuntimeError):  # torch.distributed does not know the group
        return rank, rank, 0
    return rank, ranks[rank], min(ranks)


def _saved_memory(hook: Running) -> MemoryDict:
    """Returns copies of all values by key and name; before the first step, initial values."""
    # Initial values too: ``dcp.load`` reads only the tensors that the template from ``state_dict``
    # has, and ``check_complete`` can then tell a lost value from an unused one.
    values = _declared(hook, hook.scheme, hook.step, _initial)
    for key, name, tensor in hook.engine.memory.items():
        values.setdefault(key, {})[name] = tensor.detach().clone()
    return to_checkpoint_layout(hook, hook.scheme, values)


def _declared(hook: Running, scheme: Scheme, step: int, make: MakeInitial) -> MemoryDict:
    """Returns the initial memory of a scheme by key and name, in the memory order of buckets."""
    values: MemoryDict = {}
    for name, shape, dtype, _ in hook.parameters:
        now = hook.engine.step_info(dtype, step)
        for slot in scheme.begins_with(name, shape, dtype, step):
            kept_shape = slot.shape(shape)
            first = None if kept_shape is None else make(slot, name, torch.Size(kept_shape), now)
            if first is not None:
                values.setdefault(slot.key, {})[name] = first
    return values


def _initial(slot: Slot, name: str, shape: torch.Size, now: StepInfo) -> Tensor | None:
    return slot.initial(name, shape, now)


def _like_initial(slot: Slot, name: str, shape: torch.Size, now: StepInfo) -> Tensor | None:
    """Returns an initial value on the meta device, since a file may claim any size."""
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
    if hook._closed:
        raise RegistrationError(f"{call}: {CLOSED}")
    if hook.runner.under_way:
        raise RegistrationError(f"{call}: a step is under way; load after it")
    if not dist.is_initialized():
        raise RegistrationError(
            f"{call}: rank and world size are needed to pick this rank's part: call "
            f"torch.distributed.init_process_group first"
        )
    hook.bind()
    engine, scheme = hook.engine, unwrap_flush(hook.scheme)
    hook.call_monitor.suppressed = True

    # Read the state. A compiled or wrapped model has other names than the plain one.
    saved = read(state, "load_state_dict").renamed(hook.parameters.find)
    common = saved.common
    nesting, description = without_start(common)
    fits = structure(scheme) in (common["structure"], nesting)
    if not fits and strict:
        raise CheckpointError(
            f"load_state_dict: saved by {as_typed(common['scheme'])!r}, this hook runs "
            f"{short_repr(scheme)!r}; register that scheme and switch afterwards, or pass "
            f"strict=False to keep the residual only"
        )
    if not fits:
        saved = saved.with_keys([RESIDUAL])

    # Carry it over to the pieces, the ranks and the settings of this run.
    saved = with_local_shards(saved, hook.parameters.placement, hook.parameters.find)
    _, _, leader = _rank_ids(hook)
    saved, foreign = resharded(hook, scheme, saved, leader)
    resizes = resizes_of(scheme)
    # With the flush as well: states of earlier versions name it as a part of the scheme.
    here = (describe(scheme), describe(hook.scheme))
    same_settings = fits and (common["scheme"] in here or description in here)
    # At the state's step, not the hook's: schedules keep other tensors at other steps.
    declared = _declared(hook, scheme, common["step"], _like_initial)
    declared = {key: values for key, values in declared.items() if key not in foreign}

    # Check the memory of all ranks that this one reads, and select its share.
    def check(memory: MemoryDict) -> None:
        # Shapes are compared in memory order, as parameters lie in buckets.
        memory = to_bucket_layout(hook, scheme, memory)
        keeper = scheme if keeps_residual(scheme) else FlushResidual(scheme)
        shapes = hook.parameters.shapes
        check_memory(memory, keeper, shapes, declared, same_settings=same_settings)
        if strict:
            check_complete(memory, scheme, resizes, declared, same_settings=same_settings)

    _, memory = memory_for_rank(
        saved, engine.rank, engine.world_size, resizes, leader=leader, alone=alone, check=check
    )

    # Make what the hook continues with.
    # Copies: the caller may use the tensors again, or load the same state into another hook.
    memory = {
        key: {n: v.detach().clone() for n, v in values.items()} for key, values in memory.items()
    }
    memory = to_bucket_layout(hook, scheme, memory)
    # Also on a rank that has nothing to flush, so that all ranks run the same scheme.
    if RESIDUAL in memory and not keeps_residual(scheme):
        scheme = FlushResidual(scheme)
    layout, limits = common["layout"], common.get("bucket_bytes", [])
    parts = parts_of_group(saved.parts, leader)
    # The order may differ between ranks; rank 0's decides, as in a run without a stop.
    arrival = parts[min(parts)].arrival
    return Loaded(scheme, memory, common, SavedBuckets(layout, limits, arrival))


# ``coalesce`` is outside of the delay, see ``make``.
_START = r", start_step=(\d{1,18}), before=Dense\(\)"
_DELAYED = (
    re.compile(r"(Coalesced\()?DelayedStart\((.*), Dense\)(\)?)"),
    re.compile(rf"(Coalesced\(scheme=)?DelayedStart\(scheme=(.*){_START}\)(\)?)"),
)


def without_start(common: Mapping[str, Any]) -> tuple[str, str]:
    """Returns nesting and description of a saved scheme, without ``start_step`` if it is over."""
    nesting, text = str(common["structure"]), str(common["scheme"])
    outer, whole = _DELAYED[0].fullmatch(nesting), _DELAYED[1].fullmatch(text)
    if outer is None or whole is None or int(whole[3]) > common["step"]:
        return nesting, text
    return (
        f"{outer[1] or ''}{outer[2]}{outer[3]}",
        f"{whole[1] or ''}{whole[2]}{whole[4]}",
    )


def apply(hook: Running, loaded: Loaded) -> None:
    """Applies a state that was checked."""
    engine = hook.engine
    engine.scheme = loaded.scheme
    engine.memory.load(loaded.memory)
    engine.step, engine.seed = loaded.common["step"], loaded.common["seed"]
    hook.ledger.rewind(engine.step)
    hook._apply_buckets(loaded.buckets)
    hook.target.pickled_on = None
    hook.agreed = False  # the next step compares what the ranks have loaded
    # At the end: where warnings are errors, all ranks have the state nevertheless.
    _warn_of_frozen(hook, loaded.memory.get(RESIDUAL, {}))


def _warn_of_frozen(hook: Running, residuals: Mapping[str, Tensor]) -> None:
    """Warns of residuals of parameters that are not trained here: they wait, unsent."""
    trained = {parameter_name(parameter.name) for parameter in hook.parameters}
    waiting = {
        parameter_name(name)
        for name, value in residuals.items()
        if not is_padding(name) and parameter_name(name) not in trained and bool(value.any())
    }
    if waiting and hook.engine.rank == 0:
        warnings.warn(
            f"load_state_dict: the state has a residual of parameters that are frozen now: "
            f"{listed(sorted(waiting))}. It is not sent; the hook keeps it, also in its "
            f"checkpoints, and a run that trains the parameters again sends it",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )


def needed_fields(
    hook: Running, state: StateDict, shapes: Mapping[tuple[str, str, str], torch.Size]
) -> set[str]:
    """Returns the rank fields that this rank has to read of a state whose memory is not read yet.

    Args:
        shapes: shapes of all values, by rank field, key and name.
    """
    hook.bind()
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
    placement, find = hook.parameters.placement, hook.parameters.find
    saved = with_local_shards(saved, placement, find, names)
    leader, engine = _rank_ids(hook)[2], hook.engine
    leaders = {f"rank{part.global_rank}": part.leader for part in saved.parts}
    saved_values = [
        SavedValue(leaders[field], key, name, shape)
        for (field, key, name), shape in shapes.items()
        if field in leaders
    ]
    held = saved.parts  # a rank's pieces may be in the parts of several groups
    if not needs_reshard(hook, hook.scheme, saved_values, leader):
        held = list(parts_of_group(saved.parts, leader).values())
    needed = needed_ranks(saved, engine.rank, engine.world_size, resizes_of(hook.scheme))
    # If no part in particular is needed, any part has the values that all ranks share.
    wanted = [part for part in held if part.rank in (needed or [held[0].rank])]
    return {f"rank{part.global_rank}" for part in wanted or held[:1]}
