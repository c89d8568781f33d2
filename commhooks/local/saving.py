"""The saved form of DiLoCo's outer optimizer, and the laws of what is loaded into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commhooks.checkpoint.checksum import digest
from commhooks.checkpoint.form import MAX_STEP, tensor_error, whole_number
from commhooks.errors import CheckpointError
from commhooks.local.fragments import Fragment

__all__ = ["VERSION", "check_state", "sealed"]

VERSION = 2  # 1 had no field of that name, and no checksum
_FIELDS = ("hook", "steps", "outer_steps", "outer", "momentum", "arriving")


def sealed(state: dict[str, Any]) -> dict[str, Any]:
    """A state with its version and checksum; the hook's part has its own."""
    return {**state, "version": VERSION, "checksum": _checksum(state)}


def check_state(state: object, fragments: Mapping[int, Fragment], every: int) -> Mapping[str, Any]:
    """The state, if all but the hook's part of it can be loaded into these fragments, by number.

    Raises:
        CheckpointError: foreign, incomplete, damaged, or of another model.
    """
    if not isinstance(state, Mapping) or any(field not in state for field in _FIELDS):
        raise _refused(f"takes what state_dict() returned, with {', '.join(_FIELDS)}")
    for field in ("steps", "outer_steps"):
        if not whole_number(state[field], 0, MAX_STEP):
            raise _refused(f"{field!r} is no number of steps; the file is damaged")
    for field in ("outer", "momentum"):
        _check_parameters(field, state[field], fragments)
    _check_arriving(state["arriving"], fragments, every)
    version = state.get("version", 1)
    if not whole_number(version, 1, VERSION):
        raise _refused("saved in a newer version of the format: update commhooks")
    found, wanted = state.get("checksum"), _checksum(state) if version > 1 else None
    if type(found) is not type(wanted) or found != wanted:
        raise _refused(
            "the checksum is wrong: the state was changed after it was saved, or the file is "
            "damaged. Load an older checkpoint"
        )
    return state


def _check_parameters(field: str, values: object, fragments: Mapping[int, Fragment]) -> None:
    """Raises unless there is one finite tensor for each parameter."""
    own = {
        name: value
        for one in fragments.values()
        for name, value in zip(one.names, getattr(one, field), strict=True)
    }
    if not isinstance(values, Mapping) or set(values) != set(own):
        raise _refused(
            f"{field!r} is not of the {len(own)} parameters of this model; is the checkpoint "
            f"another model's?"
        )
    for name, like in own.items():
        _check_tensor(f"{field!r} of parameter {name!r}", values[name], like.shape)
        if not bool(torch.isfinite(values[name]).all()):
            raise _refused(f"{field!r} of parameter {name!r} is not finite; it is damaged")


def _check_arriving(arriving: object, fragments: Mapping[int, Fragment], every: int) -> None:
    """Raises unless these are means of fragments that were under way."""
    if not isinstance(arriving, (list, tuple)):
        raise _refused("'arriving' is a list; the file is damaged")
    seen = set()
    for one in arriving:
        if not isinstance(one, Mapping) or any(key not in one for key in ("fragment", "mean")):
            raise _refused("'arriving' holds fragments and means; the file is damaged")
        number = one["fragment"]
        if not whole_number(number, 0, MAX_STEP) or number in seen:
            raise _refused("'arriving' holds each fragment once; the file is damaged")
        if number not in fragments:
            raise _refused("saved with more fragments; make it with as many")
        seen.add(number)
        if not whole_number(one.get("left"), 0, every):
            raise _refused("'arriving' has steps left, no more than every; the file is damaged")
        # Not checked to be finite: a rank may have diverged, and all know what to do then.
        numel = sum(value.numel() for value in fragments[number].outer)
        _check_tensor(f"the mean arriving of fragment {number}", one["mean"], torch.Size([numel]))


def _check_tensor(what: str, value: object, shape: torch.Size) -> None:
    error = tensor_error(value)
    if error is None:
        assert isinstance(value, Tensor)
        if not value.is_floating_point():
            error = f"is of {value.dtype}, not floating point"
        elif value.shape != shape:
            error = f"has shape {tuple(value.shape)}, not {tuple(shape)}"
    if error is not None:
        raise _refused(f"{what} {error}; is the checkpoint another model's?")


def _checksum(state: Mapping[str, Any]) -> str:
    tensors: dict[tuple[str, ...], Tensor] = {
        (what, name): one for what in ("outer", "momentum") for name, one in state[what].items()
    }
    arriving = []
    for one in state["arriving"]:
        arriving.append([one["fragment"], one["left"]])
        tensors["arriving", str(one["fragment"])] = one["mean"]
    return digest([state["steps"], state["outer_steps"], arriving], tensors)


def _refused(why: str) -> CheckpointError:
    return CheckpointError(f"DiLoCo.load_state_dict: {why}")
