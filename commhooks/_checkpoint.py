"""The saved form of a hook's state: tensors, numbers and strings, by rank and parameter name.

``{"format", "version", "scheme", "structure", "step", "seed", "world_size", ...,
"rank3": {"rank": 3, "memory": {"residual": {"layer.weight": Tensor}}}}``

What differs between ranks stands under the rank's own key, so that a checkpoint format that merges
equal keys of several ranks (torch.distributed.checkpoint) keeps all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks._errors import CheckpointError
from commhooks._scheme import Scheme, children

__all__ = ["FORMAT", "VERSION", "flatten_state", "unflatten_state"]

FORMAT = "commhooks.hook_state"
VERSION = 1
_COMMON = ("format", "version", "scheme", "structure", "step", "seed", "world_size")

StateDict = Mapping[str, Any]
MemoryDict = dict[str, dict[str, Tensor]]


def structure(scheme: Scheme) -> str:
    """The nesting of a scheme without its settings; a pending flush does not count."""
    name = type(scheme).__name__
    # Those of a PerParameter stand in rules, where `children` does not look.
    inner = [structure(child) for child in children(scheme)]
    if name == "FlushResidual":
        return inner[0]
    return f"{name}({', '.join(inner)})" if inner else name


def memory_for_rank(
    state: StateDict | Sequence[StateDict], rank: int, world_size: int, per_rank: Mapping[str, str]
) -> tuple[dict[str, Any], MemoryDict]:
    """The common fields and one rank's memory, from the saved states of one or of all ranks.

    With another world size than saved, what is summed (residuals) goes from old rank i to new rank
    i modulo the new world size, added up: the sum over ranks stays what it was.

    Args:
        per_rank: by key, what becomes of values that differ between ranks; see ``Scheme.per_rank``.

    Raises:
        CheckpointError: not a hook state, of a newer version, incomplete, or of another rank.
    """
    states = [state] if isinstance(state, Mapping) else state
    if not isinstance(states, (list, tuple)):
        _check_common(states)
    if not states:
        raise CheckpointError("load_state_dict: an empty list of states")
    for one in states:
        _check_common(one)
    common = {field: states[0][field] for field in _COMMON}
    for one in states[1:]:
        for field in ("version", "structure", "step", "seed", "world_size"):
            if one[field] != common[field]:
                raise CheckpointError(
                    f"load_state_dict: the states given are not of one checkpoint: {field} is "
                    f"{common[field]!r} in the first and {one[field]!r} in another"
                )
    ranks: dict[int, MemoryDict] = {}
    for one in states:
        ranks.update(_rank_memories(one))
    saved_size: int = common["world_size"]
    if saved_size == world_size:
        if rank not in ranks:
            raise CheckpointError(
                f"load_state_dict: this is rank {rank}, the state given is of rank "
                f"{', '.join(map(str, sorted(ranks)))}. Residuals differ per rank: every rank "
                f"saves and loads its own file"
            )
        return common, ranks[rank]
    missing = sorted(set(range(saved_size)) - set(ranks))
    if missing:
        raise CheckpointError(
            f"load_state_dict: saved on {saved_size} ranks, loaded on {world_size}: give the list "
            f"of all {saved_size} states, so that no residual is lost; missing: ranks {missing}"
        )
    return common, _merge([ranks[old] for old in range(saved_size)], rank, world_size, per_rank)


def _merge(
    ranks: Sequence[MemoryDict], rank: int, world_size: int, per_rank: Mapping[str, str]
) -> MemoryDict:
    merged: MemoryDict = {}
    for key in sorted({key for memory in ranks for key in memory}):
        law = per_rank.get(key)
        if law == "sum":
            merged[key] = _added(key, ranks[rank::world_size])
        elif law == "mean":
            totals = _added(key, ranks)
            merged[key] = {name: value / len(ranks) for name, value in totals.items()}
        elif law is None:
            merged[key] = dict(next(memory[key] for memory in ranks if key in memory))
    return merged


def _added(key: str, memories: Sequence[MemoryDict]) -> dict[str, Tensor]:
    """The sums of some ranks' values, by parameter."""
    totals: dict[str, Tensor] = {}
    for memory in memories:
        for name, value in memory.get(key, {}).items():
            if name in totals and totals[name].shape != value.shape:
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} has shape "
                    f"{tuple(value.shape)} on one rank and {tuple(totals[name].shape)} on "
                    f"another; are these states of one model?"
                )
            totals[name] = totals[name] + value if name in totals else value.clone()
    return totals


def _check_common(state: object) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"load_state_dict takes what state_dict() returned, got {type(state).__name__}"
        )
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"load_state_dict: not a hook state (no 'format': {FORMAT!r}); it has the fields "
            f"{sorted(map(str, state))[:8]}. Give the part that hook.state_dict() returned"
        )
    version = state.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"load_state_dict: saved in version {version!r} of the format, this release reads up "
            f"to {VERSION}: update commhooks"
        )
    missing = [field for field in _COMMON if field not in state]
    if missing:
        raise CheckpointError(f"load_state_dict: the state is incomplete, it lacks {missing}")
    for name, least in (("step", 0), ("seed", None), ("world_size", 1)):
        value = state[name]
        if not isinstance(value, int) or (least is not None and value < least):
            raise CheckpointError(
                f"load_state_dict: {name!r} is a whole number, got {value!r}; the file is damaged"
            )


def _rank_memories(state: StateDict) -> dict[int, MemoryDict]:
    found: dict[int, MemoryDict] = {}
    for key, part in state.items():
        if not (isinstance(key, str) and key.startswith("rank") and key[4:].isdigit()):
            continue
        if (
            not isinstance(part, Mapping)
            or not isinstance(part.get("memory"), Mapping)
            or "rank" not in part
        ):
            raise CheckpointError(f"load_state_dict: {key!r} is incomplete: it lacks its memory")
        if part["rank"] != int(key[4:]):
            raise CheckpointError(
                f"load_state_dict: {key!r} says it is of rank {part['rank']}; the file was mixed up"
            )
        memory: MemoryDict = {}
        for name, values in part["memory"].items():
            if not isinstance(values, Mapping) or not all(
                isinstance(value, Tensor) for value in values.values()
            ):
                raise CheckpointError(f"load_state_dict: {key}[{name!r}] does not hold tensors")
            memory[name] = dict(values)
        found[int(key[4:])] = memory
    if not found:
        raise CheckpointError("load_state_dict: the state is incomplete, it has no rank's memory")
    return found


def check_memory(memory: MemoryDict, scheme: Scheme, shapes: Mapping[str, torch.Size]) -> None:
    """Raises CheckpointError unless every value fits the scheme and a parameter of the model."""
    for key, values in memory.items():
        unknown = sorted(set(values) - set(shapes))
        if unknown:
            raise CheckpointError(
                f"load_state_dict: the checkpoint's {key!r} is of parameters that this model does "
                f"not have: {unknown[:5]}; is it another model's?"
            )
        for name, value in values.items():
            error = scheme.memory_error(key, value, shapes[name])
            if error == "unknown":
                raise CheckpointError(
                    f"load_state_dict: the checkpoint holds {key!r}, which {scheme} does not keep; "
                    f"register the scheme it was saved from"
                )
            if error is not None:
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} {error}; is the checkpoint "
                    f"another model's?"
                )
            if not torch.isfinite(value).all():
                raise CheckpointError(
                    f"load_state_dict: {key!r} of parameter {name!r} is not finite; "
                    f"the file is damaged"
                )


def flatten_state(state: StateDict) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A state dict as flat tensors and string metadata, the two things safetensors stores.

    Example:
        >>> tensors, metadata = flatten_state(hook.state_dict())
        >>> safetensors.torch.save_file(tensors, "hook.safetensors", metadata)
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for field, value in state.items():
        if not isinstance(value, Mapping):
            plain[field] = value
            continue
        plain[field] = {"rank": value["rank"], "keys": sorted(value["memory"])}
        for key, values in value["memory"].items():
            for name, tensor in values.items():
                tensors[f"{field}/{key}/{name}"] = tensor.contiguous()
    return tensors, {"commhooks": json.dumps(plain)}


def unflatten_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The state dict that ``flatten_state`` was given.

    Raises:
        CheckpointError: the metadata is missing or damaged.
    """
    try:
        state: dict[str, Any] = json.loads(metadata["commhooks"])
        for field, value in state.items():
            if isinstance(value, dict):
                empty: MemoryDict = {key: {} for key in value["keys"]}
                state[field] = {"rank": value["rank"], "memory": empty}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "unflatten_state: no readable 'commhooks' metadata; was the file saved with "
            "flatten_state(hook.state_dict())?"
        ) from error
    for path, tensor in tensors.items():
        try:
            field, key, name = path.split("/", 2)
            state[field]["memory"][key][name] = tensor
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"unflatten_state: the tensor {path!r} is not in the metadata; the file is damaged"
            ) from error
    return state
