"""Lists the facts that all ranks of a hook must have in common, for the handshake."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from commhooks._version import __version__
from commhooks.checkpoint.checksum import digest
from commhooks.checkpoint.form import SavedBuckets
from commhooks.checkpoint.ranks import resizes_of
from commhooks.core.names import is_padding, whole_name
from commhooks.core.scheme import Scheme, walk
from commhooks.core.traits import Exact
from commhooks.errors import CheckpointError
from commhooks.hook.binding import Binding
from commhooks.hook.engine import Engine
from commhooks.wrappers.feedback import Feedback, without_flush
from commhooks.wrappers.guard import Guard
from commhooks.wrappers.make import describe

__all__ = ["facts_of", "need_own_memory", "not_to_round"]

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


def not_to_round(scheme: Scheme, binding: Binding) -> frozenset[str]:
    """Returns the parameters of buckets that a scheme must not round.

    These are what ranks of tensor parallelism have in common, and have to keep equal: norms, and
    biases of row-wise layers. Most schemes would round them together with the pieces of other
    parameters, which differ between these ranks.

    Warns where such a scheme gives the optimizer something else than a mean, which no exact mean
    may stand for.
    """
    pieces, inside = binding.parameters.placement, without_flush(scheme)
    if not pieces or _rounds_alone(inside):
        return frozenset()
    # Frozen ones, too, which may be trained later; padding is no parameter.
    names = (name for name in binding.parameters.shapes if not is_padding(name))
    uncut = [name for name in names if whole_name(name) not in pieces]
    if not uncut or inside.traits.returns == "mean":
        return frozenset(uncut)
    wholes = list(dict.fromkeys(map(whole_name, uncut)))
    warnings.warn(
        f"{inside} rounds the gradients of {', '.join(wholes[:3])} ({len(wholes)} parameters that "
        f"tensor parallelism does not cut) together with those of its pieces, differently on each "
        f"of its ranks, where these parameters drift apart. Use a scheme that returns the mean of "
        f"gradients: such parameters then travel exactly",
        RuntimeWarning,
        stacklevel=4,
    )
    return frozenset()


def _rounds_alone(scheme: Scheme) -> bool:
    """Whether a scheme rounds each entry by itself, and equal ones equally."""
    return all(map(_is_alone, walk(scheme)))


def _is_alone(inside: Scheme) -> bool:
    """Whether one scheme, without those inside, rounds each entry by itself."""
    # Random draws are numbered by entry, and pieces may differ in size. A guard decides by bucket.
    if getattr(inside, "stochastic", False) or isinstance(inside, Guard):
        return False
    traits = inside.traits
    # Feedback is exact over steps only, and says so wherever it is: what is inside of it tells.
    exact = isinstance(inside, Feedback) or isinstance(traits.error, Exact)
    # Updates are no rounded means, whatever their traits say; gossip sums in full precision.
    return exact and (traits.returns != "update" or not traits.agrees)


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
