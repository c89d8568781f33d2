"""Lists the facts that all ranks of a hook must have in common, for the handshake."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from commhooks._version import __version__
from commhooks.checkpoint.checksum import digest
from commhooks.checkpoint.form import SavedBuckets
from commhooks.checkpoint.names import whole_name
from commhooks.checkpoint.ranks import resizes_of
from commhooks.core.dense import Dense
from commhooks.core.scheme import Scheme, walk
from commhooks.errors import CheckpointError
from commhooks.hook.binding import Binding
from commhooks.hook.engine import Engine
from commhooks.schemes.casts import TwoPhaseCast
from commhooks.wrappers.cast import Cast
from commhooks.wrappers.feedback import ErrorFeedback, without_flush
from commhooks.wrappers.make import describe
from commhooks.wrappers.per_parameter import PerParameter

__all__ = ["facts_of", "need_own_memory", "warn_of_uncut"]

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
        "environment": [
            fact for inside in walk(scheme) for fact in inside.environment(engine.world_size)
        ],
        "parameters": [
            f"{name} {tuple(shape)} {dtype} {pieces.get(whole_name(name), '')}".rstrip()
            for name, shape, dtype, _ in binding.parameters
        ],
    }


def warn_of_uncut(scheme: Scheme, binding: Binding) -> None:
    """Warns of parameters that ranks of tensor parallelism have in common, and will not keep equal.

    Their gradients share blocks, scales or selections with those of cut parameters, which differ
    between these ranks, and so are rounded differently.
    """
    pieces, inside = binding.parameters.placement, without_flush(scheme)
    if not pieces or isinstance(inside, PerParameter) or _rounds_alone(inside):
        return
    uncut = [name for name, *_ in binding.parameters if not pieces.get(whole_name(name))]
    if uncut:
        warnings.warn(
            f"{inside} rounds the gradients of {', '.join(uncut[:3])} ({len(uncut)} parameters "
            f"that tensor parallelism does not cut) together with those of its pieces, differently "
            f"on each of its ranks, where these parameters drift apart. Use none, bf16 or fp16, or "
            f"with DistributedDataParallel a PerParameter scheme with none for them",
            RuntimeWarning,
            stacklevel=4,
        )


def _rounds_alone(scheme: Scheme) -> bool:
    """Whether a scheme rounds each entry by itself, and equal ones equally."""
    while isinstance(scheme, ErrorFeedback | Cast) and not getattr(scheme, "stochastic", False):
        scheme = scheme.scheme
    casts = isinstance(scheme, TwoPhaseCast) and not getattr(scheme, "stochastic", False)
    return casts or isinstance(scheme, Dense)


def need_own_memory(engine: Engine, binding: Binding) -> None:
    """Raises CheckpointError if a pickled state is of another rank, or of other pieces."""
    whose = _origin(engine, binding)
    if whose != _OWN:
        raise CheckpointError(
            f"the unpickled HookState holds the memory {whose}, this is rank {engine.rank} "
            f"of {engine.world_size}. Residuals differ per rank: save "
            f"hook.state_dict(gather=True), or let every rank pickle its own"
        )


def _origin(engine: Engine, binding: Binding) -> str:
    """Returns whose memory an unpickled state holds, in words that are equal if all is well."""
    origin, here = binding.pickled_on, (engine.rank, engine.world_size)
    pieces = binding.parameters.placement
    if origin is None:
        return _OWN
    if origin.placement is not None:
        for name in dict.fromkeys(whole_name(name) for _, name, _ in engine.memory.items()):
            its, own = (of.get(name, "all") for of in (origin.placement, pieces))
            if its != own:
                return f"of a rank that trained {its} of {name!r}, where this one trains {own}"
    # Memory that is the same on every rank may come from any of them.
    keys = {key for key, _, _ in engine.memory.items()}
    if origin[:2] == here or not keys & set(resizes_of(engine.scheme)):
        return _OWN
    return f"of rank {origin.rank} of {origin.world_size}"
