"""Checks saved states of DiLoCo before anything is loaded from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commhooks.checkpoint.checksum import digest
from commhooks.checkpoint.form import MAX_STEP, tensor_error, whole_number
from commhooks.checkpoint.placement import need_placement, stored_placement
from commhooks.errors import CheckpointError
from commhooks.hook.parameters import Parameters
from commhooks.local.fragments import Fragment

__all__ = ["VERSION", "check_state", "sealed"]

# Version 1 had neither "version" nor "checksum". States of whole parameters have version 2, without
# a "placement".
VERSION = 3
_FIELDS = ("hook", "steps", "outer_steps", "outer", "momentum", "arriving")


def sealed(state: dict[str, Any], placement: Mapping[str, str]) -> dict[str, Any]:
    """Returns a state with its version and checksum; the hook's part has a checksum already.

    Args:
        placement: this rank's pieces by parameter, of those that are cut (tensor parallelism).
    """
    if placement:
        state = {**state, "placement": stored_placement(placement)}
    version = VERSION if placement else VERSION - 1
    return {**state, "version": version, "checksum": _checksum(state)}


def check_state(
    state: object, fragments: Mapping[int, Fragment], every: int, known: Parameters
) -> Mapping[str, Any]:
    """Returns a state after checking all but the hook's part, which the hook checks.

    Args:
        state: anything that was loaded from a file.
        fragments: those of the model, by number.
        every: inner steps between two exchanges of a parameter.
        known: the model's parameters.

    Raises:
        CheckpointError: the state is foreign, incomplete, damaged, or of another model.
    """
    # Types and shapes come before the checksum, whose computation relies on them.
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
    given, wanted = state.get("checksum"), _checksum(state) if version > 1 else None
    if type(given) is not type(wanted) or given != wanted:
        raise _refused(
            "the checksum is wrong: the state was changed after it was saved, or the file is "
            "damaged. Load an older checkpoint"
        )
    placement = state.get("placement", [] if version == VERSION else None)
    need_placement("DiLoCo.load_state_dict", placement, known.placement, known.find)
    return state


def _check_parameters(field: str, values: object, fragments: Mapping[int, Fragment]) -> None:
    """Raises unless ``values`` has one finite tensor for each parameter."""
    expected = {
        name: value
        for fragment in fragments.values()
        for name, value in zip(fragment.names, getattr(fragment, field), strict=True)
    }
    if not isinstance(values, Mapping) or set(values) != set(expected):
        raise _refused(
            f"{field!r} is not of the {len(expected)} parameters of this model; is the checkpoint "
            f"another model's?"
        )
    for name, like in expected.items():
        # Shapes are compared here: ``copy_`` would broadcast, and a vector of one entry fits all.
        _check_tensor(f"{field!r} of parameter {name!r}", values[name], like.shape)
        if not bool(torch.isfinite(values[name]).all()):
            raise _refused(f"{field!r} of parameter {name!r} is not finite; it is damaged")


def _check_arriving(arriving: object, fragments: Mapping[int, Fragment], every: int) -> None:
    """Raises unless ``arriving`` lists averages that fragments of this model may wait for."""
    if not isinstance(arriving, (list, tuple)):
        raise _refused("'arriving' is a list; the file is damaged")
    seen = set()
    for saved in arriving:
        if not isinstance(saved, Mapping) or any(key not in saved for key in ("fragment", "mean")):
            raise _refused("'arriving' holds fragments and means; the file is damaged")
        number = saved["fragment"]
        if not whole_number(number, 0, MAX_STEP) or number in seen:
            raise _refused("'arriving' holds each fragment once; the file is damaged")
        if number not in fragments:
            raise _refused("saved with more fragments; make it with as many")
        seen.add(number)
        if not whole_number(saved.get("left"), 0, every):
            raise _refused("'arriving' has steps left, no more than every; the file is damaged")
        # A mean that is not finite is legal: ``DiLoCo`` goes back to the last exchange then.
        numel = sum(value.numel() for value in fragments[number].outer)
        _check_tensor(f"the mean arriving of fragment {number}", saved["mean"], torch.Size([numel]))


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
    """Returns the checksum of all but the hook's part, which has one."""
    tensors: dict[tuple[str, ...], Tensor] = {
        (what, name): value for what in ("outer", "momentum") for name, value in state[what].items()
    }
    arriving = []
    for saved in state["arriving"]:
        arriving.append([saved["fragment"], saved["left"]])
        tensors["arriving", str(saved["fragment"])] = saved["mean"]
    placement = [state["placement"]] if "placement" in state else []
    return digest([state["steps"], state["outer_steps"], arriving, *placement], tensors)


def _refused(why: str) -> CheckpointError:
    return CheckpointError(f"DiLoCo.load_state_dict: {why}")
