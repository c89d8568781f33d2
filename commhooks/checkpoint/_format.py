"""Reads and checks a saved state of any scheme: its fields, ranks, tensors and checksum.

All values here may come from a damaged or hostile file. None of them is used as a size, copied or
added to another before it was checked.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from commhooks.checkpoint._placement import read_placement
from commhooks.core._names import renamed
from commhooks.errors import CheckpointError
from commhooks.kernels import all_finite
from ddp_core.exchange._devices import as_bytes

__all__ = [
    "CHECKSUM_FIELDS",
    "FLOATS",
    "FORMAT",
    "MAX_STEP",
    "REQUIRED_FIELDS",
    "VERSION",
    "MemoryDict",
    "Part",
    "Saved",
    "SavedBuckets",
    "StateDict",
    "check_fields",
    "check_numbers",
    "checksum",
    "digest",
    "is_int_between",
    "rank_fields",
    "read",
    "read_memory",
    "tensor_error",
]


# The common fields that a checksum covers. A field that an older state lacks is skipped.
CHECKSUM_FIELDS = (
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
_CHUNK = 1 << 24  # bytes of a GPU tensor that are copied to the host at once


def checksum(common: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the common fields and of one rank's part, in hexadecimal digits.

    Keys of memory without values are skipped, since not every file format keeps them.
    """
    fields = {field: common[field] for field in CHECKSUM_FIELDS if field in common}
    # One checksum per rank, not one of all: files of several ranks may be merged or split.
    ranks = [part["rank"], part["global_rank"], part["leader"]]
    optional = [part[field] for field in ("arrival", "placement") if field in part]
    values: dict[tuple[str, ...], Tensor] = {
        (key, name): value for key, names in part["memory"].items() for name, value in names.items()
    }
    return digest([fields, ranks, *optional], values)


def digest(plain: object, tensors: Mapping[tuple[str, ...], Tensor]) -> str:
    """Returns the SHA-256 of plain values and of named tensors' dtypes, shapes and bytes."""
    sha256 = hashlib.sha256()

    def add(value: object) -> None:
        # As JSON, in which tuples are lists and keys are sorted: a file may have changed both.
        sha256.update(json.dumps(value, sort_keys=True).encode() + b"\n")

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


# ---- the format


FORMAT = "commhooks.hook_state"
# Version 1 had no checksum and no global ranks. In version 2 a missing "placement" does not tell
# that a rank trains whole parameters.
VERSION = 3
REQUIRED_FIELDS = ("format", "version", "scheme", "structure", "step", "seed", "world_size")

StateDict = Mapping[str, Any]
MemoryDict = dict[str, dict[str, Tensor]]

_VERSION_2_FIELDS = ("global_rank", "leader", "checksum")  # new in version 2
# Fields that are equal in all states of one checkpoint. "scheme" may differ: an earlier version
# wrote a pending ``FlushResidual`` into it.
_EQUAL_FIELDS = [
    name for name in CHECKSUM_FIELDS if name not in ("format", "commhooks", "torch", "scheme")
]
# Without leading zeros, so that a rank has one key only; no job has more ranks than nine digits.
_RANK_KEY = re.compile(r"rank(0|[1-9][0-9]{0,8})")
MAX_STEP = 2**62  # the next steps still fit the 64 bits in which kernels take a step
_MAX_RANKS = 2**31 - 1
FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_DTYPES = FLOATS | _INTEGERS | {torch.bool}  # complex parameters are pairs of reals


class Part(NamedTuple):
    """Holds the part of a state that one rank saved.

    Attributes:
        rank: the rank within the hook's process group.
        global_rank: the rank within the job; the part is under the key "rank<global_rank>".
        leader: the smallest global rank of the group, which identifies the group.
        arrival: names of all parameters, in the order in which their gradients were ready in the
            last step; empty if not known, None if the model was not ``ddp_core``'s.
        placement: the shard that the rank trains of each parameter that tensor parallelism shards,
            by name; None if the state does not say.
    """

    rank: int
    global_rank: int
    leader: int
    memory: MemoryDict
    checksum: str | None = None
    arrival: Sequence[str] | None = None
    placement: Mapping[str, str] | None = None


class SavedBuckets(NamedTuple):
    """Holds the buckets of a run, for a resumed run.

    Attributes:
        layout: names of the parameters of each bucket.
        bucket_bytes: size limit of each bucket; empty if not known, or not final yet.
        arrival: see :class:`Part`.
    """

    layout: Sequence[Sequence[str]] = ()
    bucket_bytes: Sequence[int] = ()
    arrival: Sequence[str] | None = None


class Saved(NamedTuple):
    """Holds the checked states of one or several ranks: common fields and each rank's part."""

    common: dict[str, Any]
    parts: list[Part]

    def with_keys(self, keys: Collection[str]) -> Saved:
        """Returns the state with these keys of memory only."""
        parts = [
            part._replace(memory={key: part.memory[key] for key in keys if key in part.memory})
            for part in self.parts
        ]
        return Saved(self.common, parts)

    def renamed(self, find: Callable[[str], str]) -> Saved:
        """Returns the state with parameters renamed by ``find``, a function of the old name."""
        layout = [[find(name) for name in names] for names in self.common.get("layout", [])]
        parts = [
            part._replace(
                memory={k: renamed(names, find) for k, names in part.memory.items()},
                arrival=None if part.arrival is None else list(map(find, part.arrival)),
            )
            for part in self.parts
        ]
        return Saved({**self.common, "layout": layout}, parts)


def read(
    state: StateDict | Sequence[StateDict], call: str = "load_state_dict", *, verify: bool = True
) -> Saved:
    """Reads and checks saved states of one checkpoint.

    Args:
        state: the state of one rank, a state of several ranks, or a list of states.
        call: the name of the public call, for messages.
        verify: compares the checksums.

    Raises:
        CheckpointError: not a hook state, or one that is newer, incomplete or damaged.
    """
    states: list[Any] = list(state) if isinstance(state, (list, tuple)) else [state]
    if not states:
        raise CheckpointError(f"{call}: an empty list of states; give those of all ranks")
    for each in states:
        _check_common(each, call)
    common = {
        field: states[0][field]
        for field in (*REQUIRED_FIELDS, *CHECKSUM_FIELDS)
        if field in states[0]
    }
    for each in states[1:]:
        for field in _EQUAL_FIELDS:
            if each.get(field) != common.get(field):
                raise CheckpointError(
                    f"{call}: the states given are not of one checkpoint: {field} is "
                    f"{_short(common.get(field))} in the first and {_short(each.get(field))} in "
                    f"another"
                )
    parts: dict[int, Part] = {}
    for each in states:
        for part in _parts(each, call, verify):
            known = parts.get(part.global_rank)
            if known is not None and known.checksum != part.checksum:
                raise CheckpointError(
                    f"{call}: the states given hold two different parts of rank "
                    f"{part.global_rank}; they are not of one checkpoint"
                )
            parts[part.global_rank] = part
    return Saved(common, list(parts.values()))


def is_int_between(value: object, least: int, most: int) -> bool:
    """Whether ``value`` is an int from ``least`` to ``most``; a bool does not count as one."""
    return type(value) is int and least <= value <= most


def _instead(state: object) -> str:
    """Returns what to pass in place of something that is no state, as the end of a sentence."""
    if state is None:
        return ": has hook.state_dict(gather=True) been saved, by all ranks' call?"
    if isinstance(state, str | Path):
        return ': load the file first, torch.load(path)["hook"] for instance'
    return ": call its state_dict()" if hasattr(state, "state_dict") else ""


def _check_common(state: object, call: str) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{call} takes what state_dict() returned, got {type(state).__name__}{_instead(state)}"
        )
    if not state:
        raise CheckpointError(
            f"{call}: the state is empty: of state_dict(gather=True, dst=rank) only that rank has "
            f"it; load on every rank the file that it saved"
        )
    if not _is_text(state.get("format")) or state["format"] != FORMAT:
        parts = [
            f"state[{_short(field)}]"
            for field, part in list(state.items())[:8]
            if isinstance(part, Mapping) and _is_text(part.get("format")) and "version" in part
        ]
        raise CheckpointError(
            f"{call}: not a hook state (no 'format': {FORMAT!r}); it has the fields "
            f"{', '.join(sorted(_short(field) for field in list(state)[:8]))}. Give the part that "
            f"hook.state_dict() returned{f': {parts[0]}' if parts else ''}"
        )
    version = state.get("version")
    if not is_int_between(version, 1, VERSION):
        raise CheckpointError(
            f"{call}: saved in version {_short(version)} of the format, this release reads up to "
            f"{VERSION}: update commhooks"
        )
    missing = [field for field in REQUIRED_FIELDS if field not in state]
    if missing:
        raise CheckpointError(f"{call}: the state is incomplete, it lacks {missing}")
    for field in ("scheme", "structure", "commhooks", "torch", "plan"):
        if not _is_text(state.get(field, "")):
            raise CheckpointError(
                f"{call}: {field!r} is text, got {_short(state[field])}; the file is damaged"
            )
    ranges = {
        "step": (0, MAX_STEP),
        "seed": (-(2**63), 2**63 - 1),
        "world_size": (1, _MAX_RANKS),
    }
    check_numbers(state, ranges, call)
    _check_layout(state.get("layout", []), call)
    _check_limits(state.get("bucket_bytes", []), call)


def check_fields(state: object, fields: Collection[str], call: str) -> None:
    """Raises unless ``state`` is a dict of these fields, and no others."""
    if not isinstance(state, Mapping) or set(state) != set(fields):
        raise CheckpointError(
            f"{call}: a dict of {', '.join(fields)}, got {_short(state)}; the file is damaged"
        )


def check_numbers(
    state: StateDict, ranges: Mapping[str, tuple[int, int]], call: str = "load_state_dict"
) -> None:
    """Raises unless these fields are whole numbers in their ranges, ends included."""
    for field, (least, most) in ranges.items():
        if not is_int_between(state.get(field), least, most):
            raise CheckpointError(
                f"{call}: {field!r} is a whole number from {least} to {most}, got "
                f"{_short(state.get(field))}; the file is damaged"
            )


def _check_layout(layout: object, call: str) -> None:
    """Raises unless ``layout`` is a list of lists of parameter names, no name twice."""
    # ``type(...) is list``: a subclass, or a tensor, may override any method.
    buckets = layout if type(layout) is list else [None]
    names = [name for bucket in buckets for name in (bucket if type(bucket) is list else [None])]
    if not all(map(_is_text, names)) or len(set(names)) != len(names):
        raise CheckpointError(
            f"{call}: 'layout' is a list of lists of parameter names, no name twice, got "
            f"{_short(layout)}; the file is damaged"
        )


def _check_limits(limits: object, call: str) -> None:
    """Raises unless ``limits`` is a list of sizes in bytes."""
    if type(limits) is not list or not all(is_int_between(size, 0, 2**63 - 1) for size in limits):
        raise CheckpointError(
            f"{call}: 'bucket_bytes' is a list of whole numbers, got {_short(limits)}; the file is "
            f"damaged"
        )


def rank_fields(state: StateDict) -> set[str]:
    """Returns the names of the fields that hold a rank's part."""
    return {field for field in state if isinstance(field, str) and _RANK_KEY.fullmatch(field)}


def _parts(state: StateDict, call: str, verify: bool) -> list[Part]:
    parts = [_part(state, field, call, verify) for field in sorted(rank_fields(state))]
    if not parts:
        raise CheckpointError(f"{call}: the state is incomplete, it has no rank's part")
    return parts


def _part(state: StateDict, field: str, call: str, verify: bool) -> Part:
    part = state[field]
    if not isinstance(part, Mapping):
        raise CheckpointError(f"{call}: {field!r} is {_short(part)}, not a rank's part")
    # Version 1, or read by torch.distributed.checkpoint into a template of version 1.
    first_version = state["version"] == 1 or not any(name in part for name in _VERSION_2_FIELDS)
    required = ("rank", "memory", *(() if first_version else _VERSION_2_FIELDS))
    missing = [name for name in required if name not in part]
    if missing or not isinstance(part["memory"], Mapping):
        raise CheckpointError(
            f"{call}: {field!r} is incomplete, it lacks {', '.join(missing or ['its values'])}: "
            f"the file is damaged, or was read in part (commhooks.load_dcp reads all)"
        )
    rank, global_rank = part["rank"], part["rank" if first_version else "global_rank"]
    leader = 0 if first_version else part["leader"]
    if not is_int_between(global_rank, int(field[4:]), int(field[4:])):
        raise CheckpointError(
            f"{call}: {field!r} says it is of rank {_short(global_rank)}; the file was mixed up"
        )
    if not is_int_between(rank, 0, state["world_size"] - 1):
        raise CheckpointError(
            f"{call}: {field!r} is of rank {_short(rank)} of a group of {state['world_size']}; "
            f"the file is damaged"
        )
    if not is_int_between(leader, 0, global_rank):
        raise CheckpointError(
            f"{call}: {field!r} is of a group led by rank {_short(leader)}; the file is damaged"
        )
    memory, arrival = read_memory(part["memory"], field, call), cast(Any, part.get("arrival"))
    is_list = type(arrival) is list and all(map(_is_text, arrival))
    if arrival is not None and not (is_list and len(set(arrival)) == len(arrival)):
        raise CheckpointError(
            f"{call}: 'arrival' of {field!r} is a list of parameter names, none twice, got "
            f"{_short(arrival)}; the file is damaged"
        )
    placement = None
    if "placement" in part or state["version"] > 2:
        placement = read_placement(part.get("placement", []), f"{call}: 'placement' of {field!r}")
    # After the check of the tensors, which the checksum reads. A state of version 1 with a checksum
    # is a damaged state of version 2.
    expected, stored = None, part.get("checksum")
    if verify and not first_version:
        expected = checksum(state, part)
    if verify and (type(stored) is not type(expected) or stored != expected):
        raise CheckpointError(
            f"{call}: the checksum of {field!r} is wrong: the state was changed after it was "
            f"saved, or the file is damaged. Load an older checkpoint. (If another integration "
            f"saved it, torch.distributed.checkpoint.load reads a part only: call "
            f"commhooks.load_dcp)"
        )
    return Part(rank, global_rank, leader, memory, expected, arrival, placement)


def read_memory(stored: Any, field: str, call: str) -> MemoryDict:
    """Returns tensors by key and parameter name; raises unless all are dense and finite."""
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{call}: {field} is no dict of tensors; the file is damaged")
    memory: MemoryDict = {}
    for key, values in stored.items():
        if not _is_text(key) or not isinstance(values, Mapping) or not all(map(_is_text, values)):
            raise CheckpointError(
                f"{call}: {field}[{_short(key)}] does not hold tensors by parameter name; the "
                f"file is damaged"
            )
        for name, value in values.items():
            error = tensor_error(value)
            if error is not None:
                raise CheckpointError(
                    f"{call}: {field}[{_short(key)}][{_short(name)}] does not hold tensors of "
                    f"plain numbers: it {error}; the file is damaged"
                )
            # Checked in float32, in which kernels compute: a larger float64 value becomes infinite.
            # A NaN in memory makes all later gradients NaN, on all ranks.
            if value.is_floating_point() and not all_finite(value.detach().float()):
                raise CheckpointError(
                    f"{call}: {field}[{_short(key)}][{_short(name)}] is not finite in float32; the "
                    f"file is damaged"
                )
        memory[key] = dict(values)
    return memory


def tensor_error(value: object) -> str | None:
    """Returns why ``value`` is not a dense tensor of plain numbers, or None if it is."""
    # No other subclasses: they may override the attributes that are read below.
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"is a {type(value).__name__}"
    assert isinstance(value, Tensor)
    if value.layout != torch.strided or value.is_nested:
        return f"is not dense: its layout is {value.layout}"
    if value.is_meta:
        return "is on the meta device, without values"
    if value.dtype not in _DTYPES:
        return f"is of {value.dtype}"
    # An expanded tensor of a few bytes may have any number of entries, which a copy would allocate.
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"has {value.numel()} entries that share memory"
    return None


def _is_text(value: object) -> bool:
    return type(value) is str


def _short(value: object) -> str:
    """Returns a short text for a value of any size and type, for messages."""
    if isinstance(value, (str, bytes, list, tuple, dict)) and len(value) > 60:
        return f"a {type(value).__name__} of length {len(value)}"
    if type(value) is int and value.bit_length() > 256:  # Python refuses to print huge ones
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, int, float, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"
