"""Loads a hook's state from ``torch.distributed.checkpoint``, on any number of ranks.

``dcp.load({"hook": hook}, ...)`` reads what ``hook.state_dict()`` asks for: this rank's own part.
On another number of ranks a rank needs parts of several, and their number and sizes stand in the
checkpoint's metadata only, which no ``state_dict`` gets to see.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.checkpoint.form import rank_fields
from commhooks.errors import CheckpointError
from commhooks.hook.saving import needed_fields
from commhooks.hook.state import HookState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["load_dcp"]

_Path = tuple[str | int, ...]


class _Loads(Protocol):
    def load_state_dict(self, state: Any) -> Any: ...


def load_dcp(
    hook: _Loads,
    checkpoint: str | os.PathLike[str] | StorageReader,
    *,
    key: str = "hook",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Loads what ``dcp.save({"hook": hook, ...})`` saved, on any number of ranks.

    All ranks of ``process_group`` call it. A rank reads its own part, or on another number of
    ranks those whose residuals it takes over.

    Args:
        hook: a HookState, PowerSGDState or DiLoCo, registered as when it was saved.
        checkpoint: the folder, or a storage reader.
        key: under which it was saved.
        process_group: as for ``dcp.load``; the default group.

    Raises:
        CheckpointError: nothing is saved under that key, or what is does not fit; see
            :meth:`commhooks.HookState.load_state_dict`. Nothing was changed.

    Example:
        >>> dcp.save({"model": model.state_dict(), "hook": hook}, checkpoint_id=folder)
        >>> # later, on any number of ranks
        >>> commhooks.load_dcp(hook, folder)
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader: Any = checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata()
    paths = _paths(stored, key)
    if not paths:
        there = sorted({name.partition(".")[0] for name in stored.state_dict_metadata})
        raise CheckpointError(f"load_dcp: nothing was saved under {key!r}, but under {there[:8]}")
    tensors = [name for name in paths if hasattr(stored.state_dict_metadata[name], "chunks")]
    flat: dict[str, Any] = {name: "" for name in paths if name not in tensors}
    load(flat, storage_reader=reader, process_group=process_group)
    error: CheckpointError | None = None
    if isinstance(hook, HookState):
        state = _nested({paths[name]: value for name, value in flat.items()})
        keys = {str(path[2]) for path in map(paths.__getitem__, tensors) if len(path) > 3}
        unwanted = rank_fields(state)
        try:
            unwanted -= needed_fields(hook, state, keys)
        except CheckpointError as raised:  # once all ranks have read: `load` is a collective
            error = raised
        flat = {name: value for name, value in flat.items() if paths[name][0] not in unwanted}
        tensors = [name for name in tensors if paths[name][0] not in unwanted]
    values: dict[str, Any] = {name: _empty(stored.state_dict_metadata[name]) for name in tensors}
    load(values, storage_reader=reader, process_group=process_group)
    if error is not None:
        raise error
    hook.load_state_dict(_nested({paths[name]: one for name, one in {**flat, **values}.items()}))


def _paths(metadata: Any, key: str) -> dict[str, _Path]:
    """Where in what was saved under ``key`` each entry of the checkpoint belongs."""
    planned = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    paths = {}
    for name in metadata.state_dict_metadata:
        path = tuple(planned.get(name, name.split(".")))
        if path[0] == key and len(path) > 1:
            paths[name] = path[1:]
    return paths


def _empty(stored: Any) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _nested(values: Mapping[_Path, Any]) -> dict[str, Any]:
    """A value for each path, in dicts; in lists where a path has numbers."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        place = root
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = value
    nested: dict[str, Any] = _with_lists(root)
    return nested


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inside = {step: _with_lists(one) for step, one in value.items()}
    if inside and all(isinstance(step, int) for step in inside):
        return [inside[step] for step in sorted(inside)]
    if "rank" in inside:  # empty memory leaves no trace in a checkpoint
        inside.setdefault("memory", {})
    return inside
