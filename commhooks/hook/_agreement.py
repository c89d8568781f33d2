"""Tells what ranks must have in common: facts of the handshake, and whose memory they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks._version import __version__
from commhooks.checkpoint._form import SavedBuckets, digest
from commhooks.checkpoint._ranks import resizes_of
from commhooks.core._names import whole_name
from commhooks.core._scheme import Scheme, slot_error, walk
from commhooks.errors import CheckpointError
from commhooks.hook._binding import Binding
from commhooks.hook._engine import Engine
from commhooks.wrappers._feedback import without_flush
from commhooks.wrappers._make import describe
from ddp_core import module_facts

__all__ = ["facts_of", "need_own_memory"]

_OWN = "its own"


def facts_of(
    scheme: Scheme, engine: Engine, binding: Binding, loaded: SavedBuckets
) -> dict[str, Any]:
    """Returns the facts that must be the same on all ranks, by the name used in messages.

    Each of them decides which collectives a rank issues, or which bytes it sends: a difference
    would otherwise be a hang, or gradients that differ between ranks.

    Args:
        loaded: the buckets of a loaded state in which no step was taken yet.
    """
    # A pending flush is no difference: a rank without a residual exchanges the same.
    registered, pieces = without_flush(scheme), binding.parameters.placement
    ddp = binding.model if isinstance(binding.model, DistributedDataParallel) else None
    return {
        "scheme and options": describe(registered),
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
        "memory": _origin(engine, binding),
        **({} if ddp is None else module_facts(ddp)),
        "environment": [
            fact for inside in walk(scheme) for fact in inside.environment(engine.world_size)
        ],
        "parameters": [
            f"{name} {tuple(shape)} {dtype} {pieces.get(whole_name(name), '')}".rstrip()
            for name, shape, dtype, _ in binding.parameters
        ],
    }


def need_own_memory(engine: Engine, binding: Binding) -> None:
    """Raises CheckpointError if a pickled state is of another rank, or of other pieces."""
    whose = _origin(engine, binding)
    if whose != _OWN:
        raise CheckpointError(
            f"the unpickled HookState holds the memory {whose}; this is rank {engine.rank} "
            f"of {engine.world_size}. Residuals differ per rank: let every rank pickle its own, or "
            f"save hook.state_dict(gather=True), beside tensor parallelism once for each piece"
        )


def _origin(engine: Engine, binding: Binding) -> str:
    """Returns whose memory an unpickled state holds, in words that are equal if all is well."""
    origin, here = binding.pickled_on, (engine.rank, engine.world_size)
    pieces = binding.parameters.placement
    if origin is None:
        return _OWN
    for key, name, value in engine.memory.items():
        shape = binding.parameters.shapes.get(name)
        error = None if shape is None else slot_error(engine.scheme, key, value, shape)
        if error is not None:
            return f"of another model or scheme: {key!r} of {name!r} {error}"
    if origin.placement is not None:
        for name in dict.fromkeys(whole_name(name) for _, name, _ in engine.memory.items()):
            its, own = origin.placement.get(name, "all"), pieces.get(name, "all")
            if its != own:
                return f"of a rank that trained {its} of {name!r}, where this one trains {own}"
    # Memory that is the same on every rank may come from any of them.
    keys = {key for key, _, _ in engine.memory.items()}
    if origin[:2] == here or not keys & set(resizes_of(engine.scheme)):
        return _OWN
    return f"of rank {origin.rank} of {origin.world_size}"
