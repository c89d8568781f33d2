"""Loads a hook's state from ``torch.distributed.checkpoint``, on any number of ranks.

``dcp.load({"hook": hook}, ...)`` reads the entries that ``hook.state_dict()`` has: this rank's own
part. On another number of ranks a rank needs the parts of several ranks. Their number and sizes are
in the checkpoint's metadata only, which ``state_dict`` does not see.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.checkpoint._format import rank_fields
from commhooks.errors import CheckpointError
from commhooks.hook._parameters import find_owner
from commhooks.hook._saving import needed_fields
from commhooks.hook._state import HookState
from ddp_core._torch import is_known_group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["load_dcp"]

_Path = tuple[str | int, ...]


class _Loads(Protocol):
    @property
    def process_group(self) -> dist.ProcessGroup | None: ...

    def load_state_dict(self, state: Any) -> Any: ...


def load_dcp(
    hook: _Loads,
    checkpoint: str | os.PathLike[str] | StorageReader,
    *,
    key: str = "hook",
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Loads what ``dcp.save({"hook": hook, ...})`` saved, on any number of ranks.

    All ranks of ``process_group`` call it. A rank reads its own part or, on another number of
    ranks, the parts whose residuals it takes over.

    Args:
        hook: a HookState, PowerSGDState or DiLoCo, registered as when it was saved.
        checkpoint: the folder, or a storage reader.
        key: the key under which the hook was saved.
        process_group: as for ``dcp.load``; by default the ranks that the hook averages over.

    Raises:
        CheckpointError: there is no checkpoint, nothing is saved under ``key``, or the saved state
            does not fit; see :meth:`commhooks.hook.HookState.load_state_dict`. Nothing was changed.

    Example:
        >>> dcp.save({"model": model.state_dict(), "hook": hook}, checkpoint_id=folder)
        >>> # later, on any number of ranks
        >>> commhooks.load_dcp(hook, folder)
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    group = process_group or _own_group(hook)
    reader: Any = checkpoint
    if isinstance(checkpoint, (str, os.PathLike)):
        reader = FileSystemReader(checkpoint)
    try:
        stored = reader.read_metadata()
    except FileNotFoundError as missing:
        raise CheckpointError(
            f"load_dcp: {checkpoint} has no checkpoint of torch.distributed.checkpoint: {missing}"
        ) from missing
    paths = _paths(stored, key)
    if not paths:
        stored_keys = sorted({name.partition(".")[0] for name in stored.state_dict_metadata})
        raise CheckpointError(
            f"load_dcp: nothing was saved under {key!r}, but under {stored_keys[:8]}"
        )
    # Plain values first: they say whose parts this rank needs, which may be few of many.
    tensors = [name for name in paths if hasattr(stored.state_dict_metadata[name], "chunks")]
    flat: dict[str, Any] = {name: "" for name in paths if name not in tensors}
    load(flat, storage_reader=reader, process_group=group)
    error: CheckpointError | None = None
    if isinstance(hook, HookState):
        state = _nested({paths[name]: value for name, value in flat.items()})
        shapes = {
            (str(path[0]), str(path[2]), str(path[3])): stored.state_dict_metadata[name].size
            for name, path in ((name, paths[name]) for name in tensors)
            if len(path) > 3
        }
        unwanted = rank_fields(state)
        try:
            unwanted -= needed_fields(hook, state, shapes)
        except CheckpointError as raised:  # raised after the second ``load``, a collective
            error = raised
        flat = {name: value for name, value in flat.items() if paths[name][0] not in unwanted}
        tensors = [name for name in tensors if paths[name][0] not in unwanted]
    # ``load`` reads in place, into tensors of the stored dtypes and shapes.
    values: dict[str, Any] = {name: _empty(stored.state_dict_metadata[name]) for name in tensors}
    load(values, storage_reader=reader, process_group=group)
    if error is not None:
        raise error
    hook.load_state_dict(
        _nested({paths[name]: value for name, value in {**flat, **values}.items()})
    )


def _own_group(hook: _Loads) -> dist.ProcessGroup | None:
    """Returns the ranks that a hook averages over; None, the default group, for foreign groups.

    torch.distributed does not know the process groups of other libraries (torchft).
    """
    group = hook.process_group
    if (
        group is None and (model := find_owner(hook)) is not None
    ):  # a PowerSGDState takes its model's
        group = model.process_group
    return group if is_known_group(group) else None


def _paths(metadata: Any, key: str) -> dict[str, _Path]:
    """Returns the path, below ``key``, of each entry of the checkpoint that was saved there."""
    # The planner keeps the paths, since keys may have dots. A custom planner may keep none.
    planned = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    paths = {}
    for name in metadata.state_dict_metadata:
        path = tuple(planned.get(name, name.split(".")))
        if path[0] == key and len(path) > 1:
            paths[name] = path[1:]
    return paths


def _empty(stored: Any) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")


def _nested(values: Mapping[_Path, Any]) -> dict[str, Any]:
    """Builds nested dicts from values by path; lists where the paths have numbers."""
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
    inside = {step: _with_lists(inner) for step, inner in value.items()}
    if inside and all(isinstance(step, int) for step in inside):
        return [inside[step] for step in sorted(inside)]
    if "rank" in inside:  # a rank's part: an empty dict leaves no entry in a checkpoint
        inside.setdefault("memory", {})
    return inside
