"""Computes the checksum of one rank's saved state, which shows that a file was damaged."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commhooks.core.bytes import as_bytes

__all__ = ["FIELDS", "checksum", "digest"]

# The common fields of a checksum. A field that a state lacks, as older ones may, is left out.
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
    "plan",
)
_CHUNK = 1 << 24  # bytes of a GPU's tensor that are copied to the host at once


def checksum(common: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the common fields and of one rank's part, in hexadecimal digits.

    Keys of memory without values do not count, since not every file format keeps them.
    """
    fields = {field: common[field] for field in FIELDS if field in common}
    # One checksum per rank, not of the whole: files of several ranks may be merged or split.
    places = [part["rank"], part["global_rank"], part["leader"]]
    further = [part[field] for field in ("arrival", "placement") if field in part]
    values: dict[tuple[str, ...], Tensor] = {
        (key, name): value for key, names in part["memory"].items() for name, value in names.items()
    }
    return digest([fields, places, *further], values)


def digest(plain: object, tensors: Mapping[tuple[str, ...], Tensor]) -> str:
    """Returns the SHA-256 of plain values and of named tensors' dtypes, shapes and bytes."""
    sha256 = hashlib.sha256()

    def add(what: object) -> None:
        # As JSON, in which tuples are lists and keys are sorted: a file may have changed both.
        sha256.update(json.dumps(what, sort_keys=True).encode() + b"\n")

    add(plain)
    for path in sorted(tensors):
        value = tensors[path].detach()
        add([*path, str(value.dtype), list(value.shape)])
        flat = as_bytes(value)
        for begin in range(0, flat.numel(), _CHUNK):
            piece = flat[begin : begin + _CHUNK].cpu()
            # hashlib takes objects with the buffer protocol, which tensors do not have.
            sha256.update((ctypes.c_char * piece.numel()).from_address(piece.data_ptr()))
    return sha256.hexdigest()
