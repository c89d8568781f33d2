"""Compares the ranks' settings before a collective call: a mismatch is an error, not a hang."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks._version import __version__
from commhooks.checkpoint._format import SavedBuckets, digest
from commhooks.checkpoint._ranks import resizes_of
from commhooks.core._names import parameter_name
from commhooks.core._scheme import Scheme, slot_error, walk
from commhooks.errors import CheckpointError
from commhooks.hook._engine import Engine
from commhooks.hook._target import HookTarget
from commhooks.wrappers._feedback import unwrap_flush
from commhooks.wrappers._make import as_typed, describe
from ddp_core import (
    MismatchError,
    MissingRankError,
    SharedStore,
    SilentStoreError,
    first_difference,
    group_timeout,
    module_facts,
    shared_store,
)
from ddp_core.exchange._errors import ranks_in_words
from ddp_core.exchange._shared_store import StoreBarrier

__all__ = [
    "HANDSHAKE_LIMIT",
    "SCHEME",
    "check_memory_origin",
    "clear_keys",
    "handshake",
    "handshake_fields",
    "wait_for_all_ranks",
]


SCHEME = "scheme and options"  # the fact that is a description of a scheme
# What to do about a fact that differs between ranks.
_ADVICE = {
    SCHEME: "; give all ranks the same arguments",
    "step": "; did only some ranks load a saved state? All have to see its folder",
}
_EVERYONE = "everyone came"
_DEFAULT = timedelta(minutes=5)  # if neither the caller nor the group has a limit
_GENERATION = "commhooks/generation"

# By group: how often ranks have given up so far, and the number of calls since. Together they name
# a call, so they have to be the same on all ranks.
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = weakref.WeakKeyDictionary()


def wait_for_all_ranks(call: str, group: dist.ProcessGroup, limit: timedelta | None = None) -> None:
    """Blocks until every rank of ``group`` has called; raises on all callers after the limit.

    Does nothing on a group without a store, where a missing rank is a collective's timeout.

    Args:
        call: the name of the public call, for the message.
        limit: longest wait; the group's timeout if that is less, or if None.

    Raises:
        MissingRankError: some ranks did not come; the others get the same message.
        SilentStoreError: the process that holds the store does not answer.
    """
    store = shared_store(group)
    if store is None or group.size() == 1:
        return
    longest = min(limit or timedelta.max, group_timeout(group) or limit or _DEFAULT)
    seconds = longest.total_seconds()
    end = time.monotonic() + seconds
    try:
        point = _next_point(group, store, end)
        try:
            outcome = point.wait_for_all(_EVERYONE, end)
            if outcome is None:
                came, missing = map(ranks_in_words, point.arrived_ranks())
                text = f"not every rank came: {missing} did not within {seconds:g} s, {came} did"
                outcome = store.call(_give_up_on(group, point, text), 0.0)
        except SilentStoreError:
            # The others read this once the store answers again; this rank does not wait.
            text = f"rank {point.rank} gave up: its store was silent"
            store.call_soon(_give_up_on(group, point, text))
            raise
    except SilentStoreError as error:
        raise SilentStoreError(f"{call}: {error}") from error
    if outcome != _EVERYONE:
        raise MissingRankError(
            f"{call}: {outcome}. All ranks have to come here, between two steps; look at "
            f"the output of those that did not, which may have raised before they could, and "
            f"whether the call is under a condition, such as 'if rank == 0', that they do not meet"
        )


def clear_keys(group: dist.ProcessGroup) -> None:
    """Removes the last call's keys from the store, after all ranks have read them."""
    if group in _calls and (store := shared_store(group)) is not None:
        _point(group, store).delete_keys()


def _point(group: dist.ProcessGroup, store: SharedStore) -> StoreBarrier:
    """Returns the meeting point of the last call in the store."""
    generation, number = _calls[group]
    return StoreBarrier(store, f"commhooks/{generation}/{number}", group.rank(), group.size())


def _next_point(group: dist.ProcessGroup, store: SharedStore, end: float) -> StoreBarrier:
    # Ranks that gave up on a call have counted it, and a rank that never came has not: after that
    # their numbers differ, so numbers begin again in a new generation.
    generation = store.call(lambda client: client.add(_GENERATION, 0), end - time.monotonic())
    last = _calls.get(group, (0, 0))
    number = last[1] + 1 if last[0] == generation else 1
    _calls[group] = generation, number
    return _point(group, store)


def _give_up_on(group: dist.ProcessGroup, point: StoreBarrier, text: str) -> Callable[[Any], str]:
    """Returns a function that ends a call for which ranks are missing, and returns the outcome."""
    generation, _ = _calls[group]

    def give_up(client: Any) -> str:
        # Before the outcome is written: a rank that reads it may call again at once, and has to
        # find the new generation. Not ``add``: several ranks may give up, the last of them after
        # the first has called again.
        client.compare_set(_GENERATION, str(generation), str(generation + 1))
        return point.set_outcome(text)(client)

    return give_up


# ---- facts


# The longest wait in calls that all ranks reach at nearly the same time, since they come from a
# collective: ``register`` after DistributedDataParallel's constructor, ``switch`` after a step. In
# other calls ranks may meet for the first time, and the group's timeout holds.
HANDSHAKE_LIMIT = timedelta(minutes=5)


def handshake(
    call: str,
    facts: Mapping[str, Any],
    group: dist.ProcessGroup,
    limit: timedelta | None = None,
    *,
    message: object = None,
    waits: bool = True,
) -> list[Any]:
    """Raises on every rank if the ranks' ``facts`` differ; all ranks of ``group`` call it.

    Args:
        call: the name of the public call, for the message.
        facts: values by field, compared for equality.
        limit: longest wait for the other ranks; the group's timeout if that is less, or if None.
        message: any further object for the other ranks; may differ between ranks.
        waits: waits for all ranks at the store first, so that missing ones are named, and no
            collective is left in the group. False: where they come here as to a collective.

    Returns:
        The messages of all ranks, in rank order.

    Raises:
        MismatchError: facts differ; names the first field, the ranks and the values.
        MissingRankError: some ranks did not come; names them.
    """
    if waits:
        wait_for_all_ranks(call, group, limit)
    everyone: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(everyone, ({"call": call, **facts}, message), group=group)
    except RuntimeError as error:
        raise MissingRankError(
            f"{call}: not every rank came, or one has ended: {error}. Look at the output of the "
            f"others, which may have raised before they could come"
        ) from error
    if waits:
        clear_keys(group)  # after the gather, which no rank passes before all have read the keys
    messages = [message for _, message in everyone]
    everyone = [rank_facts for rank_facts, _ in everyone]
    # ``call`` is the first field: of ranks in different calls, nothing else is compared.
    text = first_difference(everyone)
    if text is not None:
        text = first_difference([_as_typed(rank_facts) for rank_facts in everyone])
        differing = (
            field for field in everyone[0] if len({str(t.get(field)) for t in everyone}) > 1
        )
        advice = _ADVICE.get(next(differing, ""), "")
        raise MismatchError(f"{call}: {text}{advice}")
    return messages


def _as_typed(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns a rank's facts for a message: its scheme as users type it."""
    # Schemes of two descriptions are typed in two ways.
    return {key: as_typed(value) if key == SCHEME else value for key, value in facts.items()}


# ---- the facts of a hook


_OWN = "its own"


def handshake_fields(
    scheme: Scheme, engine: Engine, target: HookTarget, loaded: SavedBuckets
) -> dict[str, Any]:
    """Returns the facts that must be the same on all ranks, by the name used in messages.

    Each fact decides which collectives a rank issues, or which bytes it sends: a difference would
    otherwise be a hang, or gradients that differ between ranks.

    Args:
        loaded: the buckets of a loaded state in which no step was taken yet.
    """
    # A pending flush is no difference: a rank without a residual exchanges the same.
    registered, pieces = unwrap_flush(scheme), target.parameters.placement
    ddp = target.model if isinstance(target.model, DistributedDataParallel) else None
    return {
        SCHEME: describe(registered),
        "commhooks version": __version__,
        "torch version": str(torch.__version__),
        "seed": engine.seed,
        "step": engine.step,
        # As a digest: the list may be as long as the model. The order of arrival may differ between
        # ranks (rank 0's decides), but not whether there is one (docs/design/steps.md).
        "order of the saved buckets": digest(
            [loaded.layout, loaded.bucket_bytes, bool(loaded.arrival)], {}
        ),
        "world size": engine.world_size,
        "memory": _origin(engine, target),
        **({} if ddp is None else module_facts(ddp)),
        "environment": [
            fact for inside in walk(scheme) for fact in inside.environment(engine.world_size)
        ],
        "parameters": [
            f"{name} {tuple(shape)} {dtype} {pieces.get(parameter_name(name), '')}".rstrip()
            for name, shape, dtype, _ in target.parameters
        ],
    }


def check_memory_origin(engine: Engine, target: HookTarget) -> None:
    """Raises CheckpointError if a pickled state is another rank's, or of other shards."""
    origin = _origin(engine, target)
    if origin != _OWN:
        raise CheckpointError(
            f"the unpickled HookState holds the state {origin}; this is rank {engine.rank} "
            f"of {engine.world_size}. Residuals differ per rank: let every rank pickle its own, or "
            f"save hook.state_dict(gather=True), with tensor parallelism once for each shard"
        )


def _origin(engine: Engine, target: HookTarget) -> str:
    """Describes the origin of an unpickled state's memory; ``_OWN`` if this rank may use it."""
    origin, here = target.pickled_on, (engine.rank, engine.world_size)
    pieces = target.parameters.placement
    if origin is None:
        return _OWN
    for key, name, value in engine.memory.items():
        shape = target.parameters.shapes.get(name)
        error = None if shape is None else slot_error(engine.scheme, key, value, shape)
        if error is not None:
            return f"of another model or scheme: {key!r} of {name!r} {error}"
    if origin.placement is not None:
        for name in dict.fromkeys(parameter_name(name) for _, name, _ in engine.memory.items()):
            piece_there, piece = origin.placement.get(name, "all"), pieces.get(name, "all")
            if piece_there != piece:
                return (
                    f"of a rank that trained {piece_there} of {name!r}, where this one trains "
                    f"{piece}"
                )
    # Memory that is the same on every rank may come from any of them.
    keys = {key for key, _, _ in engine.memory.items()}
    if origin[:2] == here or not keys & set(resizes_of(engine.scheme)):
        return _OWN
    return f"of rank {origin.rank} of {origin.world_size}"
