"""Pickles a ``HookState`` as plain values, which ``torch.load`` takes by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from commhooks.checkpoint._format import (
    FORMAT,
    VERSION,
    MemoryDict,
    SavedBuckets,
    check_numbers,
    checksum,
    is_int_between,
    read,
)
from commhooks.checkpoint._placement import stored_placement
from commhooks.checkpoint._plain_scheme import from_plain, to_plain
from commhooks.core._scheme import Scheme
from commhooks.errors import CheckpointError
from commhooks.hook._running import Running
from commhooks.hook._target import Origin

__all__ = ["Pickled", "from_pickle", "sealed", "to_pickle"]

_PICKLE = "the pickled HookState"
_MAX_RANKS = 2**31 - 1


class Pickled(NamedTuple):
    """Holds a pickled state that was checked; ``origin`` is None if its ranks were not known."""

    scheme: Scheme
    seed: int
    step: int
    history: int
    memory: MemoryDict
    buckets: SavedBuckets
    origin: Origin | None


def to_pickle(hook: Running) -> dict[str, Any]:
    """Returns the pickled form: everything except model, process group and ledger."""
    engine, hook.call_monitor.suppressed = hook.engine, True
    origin = _origin(hook)
    placement = None if origin is None else origin.placement
    memory: MemoryDict = {}
    buckets = hook.continuation.saved(hook.target.notifying_core(hook))
    # Copies: values are views of flat buffers, and a saved view brings the whole buffer along.
    for key, name, value in engine.memory.items():
        memory.setdefault(key, {})[name] = value.detach().clone()
    return sealed(
        {
            "scheme": to_plain(engine.scheme),
            "seed": engine.seed,
            "step": engine.step,
            "history": hook.ledger.history,
            "memory": memory,
            "layout": [list(names) for names in buckets.layout],
            "bucket_bytes": list(buckets.bucket_bytes),
            "arrival": None if buckets.arrival is None else list(buckets.arrival),
            "ranks": None if origin is None else origin[:2],
            "placement": None if placement is None else stored_placement(placement),
        }
    )


def sealed(pickled: dict[str, Any]) -> dict[str, Any]:
    """Adds the checksum of the state to a pickled form."""
    state, field = _as_state(pickled | {"checksum": ""})
    return pickled | {"checksum": checksum(state, state[field])}


def _origin(hook: Running) -> Origin | None:
    """Returns the rank that a hook's memory belongs to; None if its ranks are not known."""
    engine, origin = hook.engine, hook.target.pickled_on
    # A state that is pickled again before it ran still has the memory of where it came from, also
    # where it has been asked for its rank here.
    if not engine.world_size or (origin is not None and not hook.agreed):
        return origin
    return Origin(engine.rank, engine.world_size, hook.parameters.placement)


def from_pickle(pickled: Any) -> Pickled:
    """Checks a pickled state as strictly as a saved state, and returns its contents.

    Raises:
        CheckpointError: the state is damaged, or its scheme is none that a file may name.
    """
    if not isinstance(pickled, Mapping):
        raise CheckpointError(f"{_PICKLE} is damaged: it is no dict")
    check_numbers(pickled, {"history": (1, 2**62)}, _PICKLE)
    state, _ = _as_state(pickled)
    saved = read(state, _PICKLE)
    (part,) = saved.parts
    known = pickled.get("ranks") is not None
    if part.memory and not known:
        raise CheckpointError(f"{_PICKLE} is damaged: it has the state of no rank")
    # A scheme that is no dataclass has no plain form, and is pickled as it is.
    scheme = pickled.get("scheme")
    if not isinstance(scheme, Scheme):
        scheme = from_plain(scheme)
    if not isinstance(scheme, Scheme):
        raise CheckpointError(f"{_PICKLE} is damaged: it has no scheme")
    common = saved.common
    return Pickled(
        scheme=scheme,
        seed=common["seed"],
        step=common["step"],
        history=pickled["history"],
        memory=part.memory,
        buckets=SavedBuckets(common["layout"], common["bucket_bytes"], part.arrival),
        origin=Origin(part.rank, common["world_size"], part.placement) if known else None,
    )


def _as_state(pickled: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Converts a pickled form to a saved state of one rank, and the name of the rank's field."""
    ranks = (0, 1) if pickled.get("ranks") is None else pickled["ranks"]
    is_pair = type(ranks) is tuple and len(ranks) == 2
    if not is_pair or not all(is_int_between(number, 0, _MAX_RANKS) for number in ranks):
        raise CheckpointError(f"{_PICKLE} is damaged: its 'ranks' are no numbers")
    rank, world_size = ranks
    part = {"rank": rank, "memory": pickled.get("memory"), "arrival": pickled.get("arrival")}
    field, placement, sum_of_it = f"rank{rank}", pickled.get("placement"), pickled.get("checksum")
    if placement is not None:  # pickles of earlier releases do not tell
        part["placement"] = placement
    if sum_of_it is not None:  # nor have they a checksum
        part |= {"global_rank": rank, "leader": 0, "checksum": sum_of_it}
    version = 1 if sum_of_it is None else 2 if placement is None else VERSION
    return {
        "format": FORMAT,
        "version": version,
        "scheme": "",
        "structure": "",
        "step": pickled.get("step"),
        "seed": pickled.get("seed"),
        "world_size": world_size,
        "layout": pickled.get("layout", []),
        "bucket_bytes": pickled.get("bucket_bytes", []),
        field: part,
    }, field
