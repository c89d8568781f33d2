"""What all ranks of a hook have to have in common, as the handshake compares it."""

from __future__ import annotations

from typing import Any

import torch

from commhooks._version import __version__
from commhooks.checkpoint.checksum import digest
from commhooks.checkpoint.form import SavedBuckets
from commhooks.checkpoint.ranks import laws_of
from commhooks.core.scheme import Scheme, walk
from commhooks.errors import CheckpointError
from commhooks.hook.binding import Binding
from commhooks.hook.engine import Engine
from commhooks.wrappers.feedback import without_flush
from commhooks.wrappers.make import describe

__all__ = ["facts_of", "need_own_memory"]

_OWN = "its own"


def facts_of(
    scheme: Scheme, engine: Engine, binding: Binding, loaded: SavedBuckets
) -> dict[str, Any]:
    """What must be the same on all ranks, by the words in which a difference is told.

    Args:
        loaded: buckets of a loaded state that are still to come.
    """
    # A rank that a checkpoint of fewer ranks has left nothing to flush sends the same.
    inside = without_flush(scheme)
    return {
        "scheme and options": describe(inside),
        "commhooks version": __version__,
        "torch version": str(torch.__version__),
        "seed": engine.seed,
        "step": engine.step,
        "order of the saved buckets": digest(
            [loaded.layout, loaded.bucket_bytes, bool(loaded.arrival)], {}
        ),
        "world size": engine.world_size,
        "memory": _origin(engine, binding),
        "environment": [
            fact for one in walk(scheme) for fact in one.environment(engine.world_size)
        ],
        "parameters": [
            f"{name} {tuple(shape)} {dtype}" for name, shape, dtype, _ in binding.parameters
        ],
    }


def need_own_memory(engine: Engine, binding: Binding) -> None:
    """Raises CheckpointError where a pickled state came to other ranks than it was pickled on."""
    whose = _origin(engine, binding)
    if whose != _OWN:
        raise CheckpointError(
            f"the unpickled HookState holds the memory {whose}, this is rank {engine.rank} "
            f"of {engine.world_size}. Residuals differ per rank: save "
            f"hook.state_dict(gather=True), or let every rank pickle its own"
        )


def _origin(engine: Engine, binding: Binding) -> str:
    """Whose memory an unpickled state holds, in words that are equal where all is well."""
    here = (engine.rank, engine.world_size)
    keys = {key for key, _, _ in engine.memory.items()}
    if binding.pickled_on in (None, here) or not keys & set(laws_of(engine.scheme)):
        return _OWN
    rank, world_size = binding.pickled_on
    return f"of rank {rank} of {world_size}"
