"""Distributes a saved state over ranks: tensors, numbers and strings, by rank and parameter.

The form of a state:

``{"format", "version", "scheme", "structure", "step", "seed", "world_size", "layout", ...,
"rank3": {"rank": 1, "global_rank": 3, "leader": 1, "checksum": "...", "arrival": [...],
"memory": {"residual": {"layer.weight": Tensor}}}}``

Values that differ between ranks are under a key of the rank, so that a checkpoint format that
merges equal keys of several ranks (torch.distributed.checkpoint) keeps all of them. The key has the
rank within the job: two groups of ranks (shards of a model) have the same ranks within the group.
``layout`` has the names of the parameters of each bucket, ``bucket_bytes`` the sizes at which
buckets were full (empty if they are not known, or not final yet), ``arrival`` the names of all
parameters in the order in which gradients came (empty if that is not known). Where parameters are
DTensors (tensor parallelism), a rank's part also has ``placement``: which pieces it is of. Without
it a part is of whole parameters, or was saved in version 2, which does not record them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from commhooks.checkpoint._format import MemoryDict, Part, Saved, StateDict, read
from commhooks.core._names import parameter_name
from commhooks.core._scheme import Scheme, children, slots_of
from commhooks.errors import CheckpointError
from commhooks.wrappers._feedback import RESIDUAL
from ddp_core.exchange._errors import ranks_in_words

__all__ = [
    "memory_for_rank",
    "merged",
    "needed_ranks",
    "parts_of_group",
    "resizes_of",
    "structure",
    "with_local_shards",
]


def structure(scheme: Scheme) -> str:
    """Returns the nesting of a scheme without settings and without a pending flush."""
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
    """Returns the common fields and one rank's memory, from the states of one or of all ranks.

    On the saved number of ranks every rank gets back its own memory, by its rank within the hook's
    group. With n ranks saved and m ranks now, values that are summed (residuals) go from old rank i
    to new rank i modulo m, are added up and multiplied by m / n: their mean over ranks, which is
    what training applies, is preserved.

    Args:
        state: one state, a list of states, or states that were read.
        rank: the rank within the hook's group.
        world_size: the group's number of ranks.
        per_rank: treatment of values that differ between ranks, by key; see :func:`resizes_of`.
        leader: the smallest global rank of the hook's group, for a state of several groups.
        alone: counts missing parts as empty; False: a missing part is an error.
        check: called with each old rank's memory before it is used.

    Raises:
        CheckpointError: the state is not a hook state, is newer or incomplete, or is of another
            rank.
    """
    saved = state if isinstance(state, Saved) else read(state)
    common, parts = saved.common, parts_of_group(saved.parts, leader)
    saved_size: int = common["world_size"]
    needed = needed_ranks(saved, rank, world_size, per_rank)
    # In rank order: sums have the same bits in whatever order the parts were given. ``needed`` may
    # be a range of as many ranks as a damaged file says, so it is never listed.
    used = [parts[old] for old in sorted(parts) if old in needed]
    missing = 0 if alone else len(needed) - len(used)
    if missing and saved_size == world_size:
        raise CheckpointError(
            f"load_state_dict: this is rank {rank}, the state given is of "
            f"{ranks_in_words(sorted(parts))}. Residuals differ per rank: save "
            f"hook.state_dict(gather=True), which is of all ranks, or let every rank save and "
            f"load its own file"
        )
    if missing:
        first = list(islice((old for old in needed if old not in parts), 8))
        raise CheckpointError(
            f"load_state_dict: saved on {saved_size} ranks, loaded on {world_size}: give "
            f"state_dict(gather=True), the list of all {saved_size} states, or from "
            f"torch.distributed.checkpoint use commhooks.load_dcp, so that no residual is lost; "
            f"missing: ranks {first}{' ...' if missing > len(first) else ''}"
        )
    has_own = bool(used) or not needed
    used = used or [next(iter(parts.values()))]  # values that are the same on all ranks are in any
    for part in used:
        check(part.memory)
    if saved_size == world_size:
        memory = used[0].memory
        return common, {key: memory[key] for key in memory if has_own or key not in per_rank}
    return common, merged(used, rank, saved_size, world_size, per_rank)


def needed_ranks(
    saved: Saved, rank: int, world_size: int, per_rank: Mapping[str, str]
) -> Sequence[int]:
    """Returns the old ranks in the group whose parts a rank needs; none if any part will do."""
    # Only keys with values count: a scheme that keeps nothing loads the state of any rank.
    keys = {key for part in saved.parts for key, values in part.memory.items() if values}
    resizes = {per_rank[key] for key in keys if key in per_rank}
    saved_size: int = saved.common["world_size"]
    if saved_size == world_size:
        return [rank] if resizes else []
    if "mean" in resizes:  # every new rank gets the mean over all old ranks
        return range(saved_size)
    return range(rank, saved_size, world_size) if "sum" in resizes else []


def parts_of_group(parts: Sequence[Part], leader: int | None) -> dict[int, Part]:
    """Returns the parts of the group of ``leader``, or of the only group, by rank within it."""
    # The leader of a single group is not compared: another job may place it on other ranks.
    leaders = sorted({part.leader for part in parts})
    if len(leaders) > 1 and leader not in leaders:
        raise CheckpointError(
            f"load_state_dict: the state is of {len(leaders)} groups of ranks, which begin with "
            f"{ranks_in_words(leaders)}; the hook's group begins with rank {leader}: give the part "
            f"of one group"
        )
    wanted = leader if len(leaders) > 1 else leaders[0]
    return {part.rank: part for part in parts if part.leader == wanted}


def with_local_shards(
    saved: Saved,
    here: Mapping[str, str],
    find: Callable[[str], str],
    names_of_ranks: Mapping[int, Collection[str]] | None = None,
) -> Saved:
    """Returns a state with the parts of ranks that had the same tensor-parallel shards.

    Parameters without memory in a part are not compared, nor parts without a placement.

    Args:
        here: this rank's shards of cut parameters, by name; see :class:`Part`.
        find: returns this model's name of a parameter in the state.
        names_of_ranks: names of values by global rank; None: those in the parts.

    Raises:
        CheckpointError: there are no such parts.
    """
    unlike, fitting = [], []
    for part in saved.parts:
        values = (name for of_key in part.memory.values() for name in of_key)
        names = values if names_of_ranks is None else names_of_ranks[part.global_rank]
        wholes = dict.fromkeys(find(parameter_name(name)) for name in names)
        pieces = {find(name): piece for name, piece in (part.placement or {}).items()}
        differing = [name for name in wholes if pieces.get(name, "") != here.get(name, "")]
        if differing and part.placement is not None:
            unlike.append((pieces.get(differing[0]) or "all of it", differing[0]))
        else:
            fitting.append(part)
    if not fitting:
        piece, name = unlike[0]
        raise CheckpointError(
            f"load_state_dict: the state is of another part of the model: of {name!r} it has "
            f"{piece}, and this rank trains {here.get(name) or 'all of it'}. Give each rank what "
            f"ranks with the same shards saved: state_dict(gather=True) of their group, the list "
            f"of the states of all ranks, or from torch.distributed.checkpoint use "
            f"commhooks.load_dcp. The state of a scheme is not sharded again for another number "
            f"of ranks of tensor parallelism"
        )
    return Saved(saved.common, fitting)


def merged(
    used: Sequence[Part],
    rank: int,
    saved_size: int,
    world_size: int,
    per_rank: Mapping[str, str],
) -> MemoryDict:
    """Computes a rank's memory from the parts of another number of ranks.

    Args:
        used: parts; those whose rank is ``rank`` modulo ``world_size`` are added up here.
        rank, world_size: the new rank, and the new number of ranks.
        saved_size: number of old ranks.
        per_rank: treatment of values that differ between ranks, by key.
    """
    everyone = [part.memory for part in used]
    memories = [part.memory for part in used if part.rank % world_size == rank]
    values: MemoryDict = {}
    for key in sorted({key for memory in everyone for key in memory}):
        resize = per_rank.get(key)
        if resize == "sum":
            values[key] = _added(key, memories, world_size / saved_size)
        elif resize == "mean":
            # Of the parts there are: of ranks that have died there is none.
            values[key] = _added(key, everyone, 1.0 / len(everyone))
        elif resize is None:
            values[key] = dict(next(memory[key] for memory in everyone if key in memory))
        # "drop": the values cannot be combined (packed bytes), so the scheme begins with new ones.
    return values


def _added(key: str, memories: Sequence[MemoryDict], factor: float) -> dict[str, Tensor]:
    """Returns the sums of some ranks' values times ``factor``, by parameter."""
    totals: dict[str, Tensor] = {}
    for memory in memories:
        for name, value in memory.get(key, {}).items():
            if name in totals and totals[name].shape != value.shape:
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} has shape "
                    f"{tuple(value.shape)} on one rank and {tuple(totals[name].shape)} on "
                    f"another; are these states of one model?"
                )
            # Scaled before the sum, which on fewer ranks could otherwise overflow.
            scaled = value * factor
            totals[name] = totals[name].add_(scaled) if name in totals else scaled
    return totals


def resizes_of(scheme: Scheme) -> dict[str, str]:
    """Returns the treatment of memory that differs between ranks, by key: "sum", "mean", "drop"."""
    resizes = {RESIDUAL: "sum"}  # for any scheme: a residual may be flushed
    resizes |= {slot.key: slot.resize for slot in slots_of(scheme) if slot.resize != "same"}
    return resizes
