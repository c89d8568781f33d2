"""The saved form of a hook's state: tensors, numbers and strings, by rank and parameter name.

``{"format", "version", "scheme", "structure", "step", "seed", "world_size", "layout", ...,
"rank3": {"rank": 1, "global_rank": 3, "leader": 1, "checksum": "...", "arrival": [...],
"memory": {"residual": {"layer.weight": Tensor}}}}``

What differs between ranks stands under the rank's own key, so that a checkpoint format that merges
equal keys of several ranks (torch.distributed.checkpoint) keeps all of it. The key is of the rank
within the job: two groups of ranks (shards of a model) have different ones. ``layout`` has the
names of the parameters of each bucket, ``bucket_bytes`` the sizes at which buckets were full (none
where that is not known, or the buckets were not final yet), ``arrival`` the names of all parameters
in the order in which gradients came (none where that is not known).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from commhooks.checkpoint.form import FORMAT, VERSION, MemoryDict, Part, Saved, StateDict, read
from commhooks.core.scheme import Scheme, children, slots_of
from commhooks.errors import CheckpointError
from commhooks.wrappers.feedback import RESIDUAL

__all__ = [
    "FORMAT",
    "VERSION",
    "laws_of",
    "memory_for_rank",
    "needed_ranks",
    "parts_of_group",
    "structure",
]


def structure(scheme: Scheme) -> str:
    """The nesting of a scheme without its settings; a pending flush does not count."""
    name = type(scheme).__name__
    inner = [structure(child) for child in children(scheme)]
    if name == "FlushResidual":
        return inner[0]
    return f"{name}({', '.join(inner)})" if inner else name


def memory_for_rank(
    state: StateDict | Sequence[StateDict] | Saved,
    rank: int,
    world_size: int,
    per_rank: Mapping[str, str],
    *,
    leader: int | None = None,
    alone: bool = False,
    check: Callable[[MemoryDict], None] = lambda memory: None,
) -> tuple[dict[str, Any], MemoryDict]:
    """The common fields and one rank's memory, from the saved states of one or of all ranks.

    On as many ranks as saved every rank gets back its own, by its rank within the hook's group. On
    n ranks saved and m now, what is summed (residuals) goes from old rank i to new rank i modulo m,
    added up and times m / n: their mean over ranks, which is what training applies, stays.

    Args:
        per_rank: by key, what becomes of values that differ between ranks; see ``Scheme.per_rank``.
        leader: the smallest global rank of the hook's group, for a state of several groups.
        alone: ranks whose parts are missing owe nothing, else they are an error.
        check: called with each old rank's memory before it is used.

    Raises:
        CheckpointError: not a hook state, of a newer version, incomplete, or of another rank.
    """
    saved = state if isinstance(state, Saved) else read(state)
    common, parts = saved.common, parts_of_group(saved.parts, leader)
    saved_size: int = common["world_size"]
    needed = needed_ranks(saved, rank, world_size, per_rank)
    used = [parts[one] for one in sorted(parts) if one in needed]
    missing = 0 if alone else len(needed) - len(used)
    if missing and saved_size == world_size:
        raise CheckpointError(
            f"load_state_dict: this is rank {rank}, the state given is of rank "
            f"{_listed(sorted(parts))}. Residuals differ per rank: save "
            f"hook.state_dict(gather=True), which is of all ranks, or let every rank save and "
            f"load its own file"
        )
    if missing:
        first = list(islice((one for one in needed if one not in parts), 8))
        raise CheckpointError(
            f"load_state_dict: saved on {saved_size} ranks, loaded on {world_size}: give "
            f"state_dict(gather=True), the list of all {saved_size} states, or from "
            f"torch.distributed.checkpoint use commhooks.load_dcp, so that no residual is lost; "
            f"missing: ranks {first}{' ...' if missing > len(first) else ''}"
        )
    own = bool(used) or not needed
    used = used or [next(iter(parts.values()))]  # what is the same on all ranks is in any
    for part in used:
        check(part.memory)
    if saved_size == world_size:
        memory = used[0].memory
        return common, {key: memory[key] for key in memory if own or key not in per_rank}
    return common, _merge(used, rank, saved_size, world_size, per_rank)


def needed_ranks(
    saved: Saved, rank: int, world_size: int, per_rank: Mapping[str, str]
) -> Sequence[int]:
    """The old ranks, within their group, whose parts a rank needs; none if any part will do."""
    keys = {key for part in saved.parts for key, values in part.memory.items() if values}
    laws = {per_rank[key] for key in keys if key in per_rank}
    saved_size: int = saved.common["world_size"]
    if saved_size == world_size:
        return [rank] if laws else []
    if "mean" in laws:
        return range(saved_size)
    return range(rank, saved_size, world_size) if "sum" in laws else []


def parts_of_group(parts: Sequence[Part], leader: int | None) -> dict[int, Part]:
    """The parts of the group that has this leader, or of the only one, by rank within it."""
    leaders = sorted({part.leader for part in parts})
    if len(leaders) > 1 and leader not in leaders:
        raise CheckpointError(
            f"load_state_dict: the state is of {len(leaders)} groups of ranks, which begin with "
            f"ranks {_listed(leaders)}; the hook's group begins with rank {leader}: give the part "
            f"of one group"
        )
    wanted = leader if len(leaders) > 1 else leaders[0]
    return {part.rank: part for part in parts if part.leader == wanted}


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _merge(
    used: Sequence[Part],
    rank: int,
    saved_size: int,
    world_size: int,
    per_rank: Mapping[str, str],
) -> MemoryDict:
    everyone = [part.memory for part in used]
    own = [part.memory for part in used if part.rank % world_size == rank]
    merged: MemoryDict = {}
    for key in sorted({key for memory in everyone for key in memory}):
        law = per_rank.get(key)
        if law == "sum":
            merged[key] = _added(key, own, world_size / saved_size)
        elif law == "mean":
            merged[key] = _added(key, everyone, 1.0 / saved_size)
        elif law is None:
            merged[key] = dict(next(memory[key] for memory in everyone if key in memory))
    return merged


def _added(key: str, memories: Sequence[MemoryDict], factor: float) -> dict[str, Tensor]:
    """The sums of some ranks' values times ``factor``, by parameter."""
    totals: dict[str, Tensor] = {}
    for memory in memories:
        for name, value in memory.get(key, {}).items():
            if name in totals and totals[name].shape != value.shape:
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} has shape "
                    f"{tuple(value.shape)} on one rank and {tuple(totals[name].shape)} on "
                    f"another; are these states of one model?"
                )
            # Scaled first: the sum of finite values stays finite on fewer ranks.
            scaled = value * factor
            totals[name] = totals[name].add_(scaled) if name in totals else scaled
    return totals


def laws_of(scheme: Scheme) -> dict[str, str]:
    """What becomes of memory that differs between ranks, by key."""
    laws = {RESIDUAL: "sum"}  # whatever runs now: it may be flushed
    laws |= {slot.key: slot.resize for slot in slots_of(scheme) if slot.resize != "same"}
    return laws
