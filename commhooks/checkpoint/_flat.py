"""Converts a state to flat tensors and strings, as safetensors stores them, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from torch import Tensor

from commhooks.checkpoint._format import MemoryDict, StateDict, read_memory
from commhooks.core._settings import from_json
from commhooks.errors import CheckpointError

__all__ = ["flatten_state", "unflatten_state"]


def flatten_state(state: StateDict) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Converts a state dict to tensors by name and string metadata, as safetensors stores them.

    Raises:
        CheckpointError: ``state`` is not what ``state_dict()`` returned.

    Example:
        >>> tensors, metadata = flatten_state(hook.state_dict())
        >>> safetensors.torch.save_file(tensors, "hook.safetensors", metadata)
    """
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    try:
        for field, value in state.items():
            if not isinstance(value, Mapping):
                plain[field] = value
                continue
            memory = read_memory(value["memory"], field, "flatten_state")
            rest = {name: entry for name, entry in value.items() if name != "memory"}
            # The keys as well, since a key without tensors has no entry.
            plain[field] = {**rest, "keys": sorted(memory)}
            for key, values in memory.items():
                for name, tensor in values.items():
                    # The name is last, so it may have slashes. safetensors refuses strided tensors.
                    tensors[f"{field}/{_quoted(key)}/{name}"] = tensor.contiguous()
        return tensors, {"commhooks": json.dumps(plain)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "flatten_state takes what hook.state_dict() returned, and nothing else in it"
        ) from error


def unflatten_state(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Inverts ``flatten_state``: returns the state dict.

    Raises:
        CheckpointError: the metadata is missing or damaged.
    """
    memories: dict[str, MemoryDict] = {}
    try:
        state: dict[str, Any] = from_json(metadata["commhooks"])
        for field, value in state.items():
            if isinstance(value, dict):
                keys = value.pop("keys")
                value["memory"] = {key: {} for key in keys}
                memories[field] = {_quoted(key): value["memory"][key] for key in keys}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "unflatten_state: no readable 'commhooks' metadata; was the file saved with "
            "flatten_state(hook.state_dict())?"
        ) from error
    for path, tensor in tensors.items():
        try:
            field, key, name = path.split("/", 2)
            memories[field][key][name] = tensor
        except (AttributeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"unflatten_state: the tensor {path!r} is not in the metadata; the file is damaged"
            ) from error
    return state


def _quoted(key: str) -> str:
    """Quotes a key of memory, in which a slash would end the key."""
    return quote(key, safe="")
