"""How a ``HookState`` is pickled: as plain values, which ``torch.load`` takes by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commhooks.checkpoint.form import (
    MAX_STEP,
    MemoryDict,
    SavedBuckets,
    check_layout,
    check_limits,
    read_memory,
    whole_number,
)
from commhooks.checkpoint.plain_scheme import from_plain, to_plain
from commhooks.core.scheme import Scheme
from commhooks.errors import CheckpointError
from commhooks.hook.saving import laws_of

if TYPE_CHECKING:
    from commhooks.hook.state import HookState

__all__ = ["buckets_of", "check_pickled", "need_own_memory", "origin", "to_pickle"]


def to_pickle(hook: HookState) -> dict[str, Any]:
    """What is pickled: all but the model, the process group and the ledger."""
    engine, hook._attendance.excused = hook._engine, True
    memory: MemoryDict = {}
    buckets = hook._saved_buckets()
    for key, name, value in engine.memory.items():
        memory.setdefault(key, {})[name] = value.detach().clone()
    return {
        "scheme": to_plain(engine.scheme),
        "seed": engine.seed,
        "step": engine.step,
        "history": hook._history,
        "memory": memory,
        "layout": [list(names) for names in buckets.layout],
        "bucket_bytes": list(buckets.bucket_bytes),
        "arrival": None if buckets.arrival is None else list(buckets.arrival),
        "ranks": (engine.rank, engine.world_size) if engine.world_size else hook._pickled_on,
    }


def check_pickled(saved: Any) -> Scheme:
    """The scheme of a pickled state.

    Raises:
        CheckpointError: damaged, or of a scheme that is not imported.
    """
    if not isinstance(saved, dict):
        raise CheckpointError("the pickled HookState is damaged: it is no dict")
    numbers = {"seed": (-(2**63), 2**63 - 1), "step": (0, MAX_STEP), "history": (1, 2**62)}
    for field, (least, most) in numbers.items():
        if not whole_number(saved.get(field), least, most):
            raise CheckpointError(f"the pickled HookState is damaged: its {field!r} is no number")
    ranks = saved.get("ranks")
    if ranks is not None and not (
        isinstance(ranks, tuple) and len(ranks) == 2 and all(type(one) is int for one in ranks)
    ):
        raise CheckpointError("the pickled HookState is damaged: its 'ranks' are no numbers")
    read_memory(saved.get("memory"), "memory", "the pickled HookState")
    layout, limits, arrival = buckets_of(saved)
    check_layout(layout, "the pickled HookState")
    check_layout([[] if arrival is None else arrival], "the pickled HookState")
    check_limits(limits, "the pickled HookState")
    scheme = saved.get("scheme")
    if not isinstance(scheme, Scheme):
        scheme = from_plain(scheme)
    if not isinstance(scheme, Scheme):
        raise CheckpointError("the pickled HookState is damaged: it has no scheme")
    return scheme


def buckets_of(saved: dict[str, Any]) -> SavedBuckets:
    """What a pickled state says of the model's buckets."""
    layout, limits = saved.get("layout", []), saved.get("bucket_bytes", [])
    return SavedBuckets(layout, limits, saved.get("arrival"))


def origin(hook: HookState) -> str:
    """Whose memory an unpickled state holds, in words that are equal where all is well."""
    here = (hook._engine.rank, hook._engine.world_size)
    laws = laws_of(hook.scheme)
    keys = {key for key, _, _ in hook._engine.memory.items()}
    if hook._pickled_on in (None, here) or not keys & set(laws):
        return "its own"
    rank, world_size = hook._pickled_on
    return f"of rank {rank} of {world_size}"


def need_own_memory(hook: HookState) -> None:
    """Raises CheckpointError where a pickled state came to other ranks than it was pickled on."""
    whose = origin(hook)
    if whose != "its own":
        raise CheckpointError(
            f"the unpickled HookState holds the memory {whose}, this is rank {hook._engine.rank} "
            f"of {hook._engine.world_size}. Residuals differ per rank: save "
            f"hook.state_dict(gather=True), or let every rank pickle its own"
        )
