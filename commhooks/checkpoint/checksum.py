"""The checksum of one rank's saved state: a damaged file is found before anything is changed."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commhooks.core.bytes import as_bytes

__all__ = ["FIELDS", "checksum", "digest"]

# Those that a state may lack are left out where it does.
FIELDS = (
    "format",
    "version",
    "commhooks",
    "torch",
    "scheme",
    "structure",
    "step",
    "seed",
    "world_size",
    "layout",
    "bucket_bytes",
)
_CHUNK = 1 << 24  # bytes that are on the host at once


def checksum(common: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """SHA-256, in hexadecimal digits, of the common fields and of one rank's part.

    Keys without values do not count: not every format keeps them.
    """
    fields = {field: common[field] for field in FIELDS if field in common}
    places = [part["rank"], part["global_rank"], part["leader"]]
    arrival = [part["arrival"]] if "arrival" in part else []
    values: dict[tuple[str, ...], Tensor] = {
        (key, name): one for key, names in part["memory"].items() for name, one in names.items()
    }
    return digest([fields, places, *arrival], values)


def digest(plain: object, tensors: Mapping[tuple[str, ...], Tensor]) -> str:
    """SHA-256 of plain values, and of named tensors' dtypes, shapes and bytes."""
    found = hashlib.sha256()

    def add(what: object) -> None:
        found.update(json.dumps(what, sort_keys=True).encode() + b"\n")

    add(plain)
    for path in sorted(tensors):
        value = tensors[path].detach()
        add([*path, str(value.dtype), list(value.shape)])
        flat = as_bytes(value)
        for begin in range(0, flat.numel(), _CHUNK):
            piece = flat[begin : begin + _CHUNK].cpu()
            found.update((ctypes.c_char * piece.numel()).from_address(piece.data_ptr()))
    return found.hexdigest()
