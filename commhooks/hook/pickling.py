"""Pickles a ``HookState`` as plain values, which ``torch.load`` takes by default."""

from __future__ import annotations

from typing import Any

from commhooks.checkpoint.form import (
    MAX_STEP,
    MemoryDict,
    SavedBuckets,
    check_layout,
    check_limits,
    read_memory,
    whole_number,
)
from commhooks.checkpoint.placement import read_placement, stored_placement
from commhooks.checkpoint.plain_scheme import from_plain, to_plain
from commhooks.core.scheme import Scheme
from commhooks.errors import CheckpointError
from commhooks.hook.binding import Origin
from commhooks.hook.running import Running

__all__ = ["buckets_of", "check_pickled", "origin_of", "to_pickle"]

_PICKLE = "the pickled HookState"


def to_pickle(hook: Running) -> dict[str, Any]:
    """Returns the pickled form: everything except model, process group and ledger."""
    engine, hook._attendance.excused = hook._engine, True
    origin = _origin(hook)
    placement = None if origin is None else origin.placement
    memory: MemoryDict = {}
    buckets = hook._continuation.saved(hook._binding.core_telling(hook))
    # Copies: values are views of flat buffers, and a saved view brings the whole buffer along.
    for key, name, value in engine.memory.items():
        memory.setdefault(key, {})[name] = value.detach().clone()
    return {
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


def _origin(hook: Running) -> Origin | None:
    """Returns whose memory a hook has; None if its ranks are not known."""
    engine, origin = hook._engine, hook._binding.pickled_on
    # A state that is pickled again before it ran still has the memory of where it came from, also
    # where it has been asked for its rank here.
    if not engine.world_size or (origin is not None and not hook._agreed):
        return origin
    return Origin(engine.rank, engine.world_size, hook._parameters.placement)


def check_pickled(saved: Any) -> Scheme:
    """Checks a pickled state and returns its scheme.

    Raises:
        CheckpointError: the state is damaged, or its scheme is not imported.
    """
    # A pickle has no checksum, so types and ranges are all there is to check.
    if not isinstance(saved, dict):
        raise CheckpointError(f"{_PICKLE} is damaged: it is no dict")
    numbers = {"seed": (-(2**63), 2**63 - 1), "step": (0, MAX_STEP), "history": (1, 2**62)}
    for field, (least, most) in numbers.items():
        if not whole_number(saved.get(field), least, most):
            raise CheckpointError(f"{_PICKLE} is damaged: its {field!r} is no number")
    ranks = saved.get("ranks")
    if ranks is not None and not (
        isinstance(ranks, tuple) and len(ranks) == 2 and all(type(rank) is int for rank in ranks)
    ):
        raise CheckpointError(f"{_PICKLE} is damaged: its 'ranks' are no numbers")
    origin_of(saved)  # raises if it is damaged
    read_memory(saved.get("memory"), "memory", _PICKLE)
    layout, limits, arrival = buckets_of(saved)
    check_layout(layout, _PICKLE)
    check_layout([[] if arrival is None else arrival], _PICKLE)
    check_limits(limits, _PICKLE)
    # A scheme that is no dataclass has no plain form, and is pickled as it is.
    scheme = saved.get("scheme")
    if not isinstance(scheme, Scheme):
        scheme = from_plain(scheme)
    if not isinstance(scheme, Scheme):
        raise CheckpointError(f"{_PICKLE} is damaged: it has no scheme")
    return scheme


def origin_of(saved: dict[str, Any]) -> Origin | None:
    """Returns where a state was pickled; None if it did not know its ranks yet."""
    if saved.get("ranks") is None:
        return None
    stored = saved.get("placement")  # pickles of earlier releases do not tell
    placement = None if stored is None else read_placement(stored, f"{_PICKLE}: 'placement'")
    rank, world_size = saved["ranks"]
    return Origin(rank, world_size, placement)


def buckets_of(saved: dict[str, Any]) -> SavedBuckets:
    """Returns the buckets in a pickled state."""
    # Defaults: states of earlier versions lack these fields.
    layout, limits = saved.get("layout", []), saved.get("bucket_bytes", [])
    return SavedBuckets(layout, limits, saved.get("arrival"))
