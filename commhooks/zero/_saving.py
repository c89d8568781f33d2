"""Saves the state of a sharded optimizer, by parameter, and cuts loaded states into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.checkpoint._placement import check_placement, stored_placement
from commhooks.errors import CheckpointError
from commhooks.hook._parameters import Parameters
from commhooks.hook._saving import gather_states
from commhooks.zero._shard import Piece, copied

__all__ = [
    "add_version",
    "check",
    "gathered",
    "groups",
    "home_of",
    "load_piece",
    "saved_pieces",
]

_VERSION = 2  # version 1 had no "placement", which states of whole parameters still lack
_FIELDS = ("version", "hook", "groups", "pieces")
Saved = dict[str, dict[str, Any]]  # by name: begin and end, exact values, state


def add_version(state: dict[str, Any], placement: Mapping[str, str]) -> dict[str, Any]:
    """Adds the version and, with tensor parallelism, the placement of shards to a state.

    Args:
        placement: the shards that this rank trains, by parameter (tensor parallelism).
    """
    if not placement:
        return {"version": _VERSION - 1, **state}
    return {"version": _VERSION, **state, "placement": stored_placement(placement)}


def groups(
    present: Iterable[Mapping[str, Any]],
    members: Iterable[tuple[Any, Sequence[Tensor]]],
    names: Callable[[Iterable[Tensor]], list[str]],
) -> list[dict[str, Any]]:
    """Returns settings and parameter names of each group, as they are saved.

    Args:
        present: groups of the optimizer.
        members: settings and parameters of each group.
        names: returns the names of parameters.
    """
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "names": names(parameters),
        }
        for group, (_, parameters) in zip(present, members, strict=True)
    ]


def saved_pieces(pieces: Iterable[Piece], states: Mapping[Tensor, Any]) -> Saved:
    """Returns copies of the exact values and of the optimizer's state of each piece.

    ``entries`` are the tensors with one number per entry; ``rest`` are the others (step counts).
    """
    saved: Saved = {}
    for piece in pieces:
        entries, rest = {"exact": piece.value.detach().clone()}, {}
        for key, value in copied(states.get(piece.value, {})).items():
            if isinstance(value, Tensor) and value.shape == piece.value.shape:
                entries[f"state.{key}"] = value
            else:
                rest[key] = value
        begin, end = piece.entries.start, piece.entries.stop
        saved[piece.name] = {"begin": begin, "end": end, "entries": entries, "rest": rest}
    return saved


def gathered(
    pieces: Saved, known: Parameters, group: dist.ProcessGroup, dst: int | None
) -> Saved | None:
    """Gathers the pieces of all ranks by parameter, in the parameter's shape, on the CPU.

    Args:
        dst: the only rank of the group that gets them; the others get None. None: all get them.
    """
    memory: dict[str, dict[str, Tensor]] = {}
    for name, piece in pieces.items():
        for key, value in piece["entries"].items():
            memory.setdefault(key, {})[name] = value
    about = {
        name: {**piece, "entries": (), "rest": copied(piece["rest"], "cpu")}
        for name, piece in pieces.items()
    }
    part = {"about": about, "memory": memory}
    whole = gather_states(
        "ZeroOptimizer.state_dict(gather=True)", {f"rank{group.rank()}": part}, None, group, dst
    )
    if not whole:
        return None
    # Ranks own parts in their order, so those of a parameter come in order, too.
    ranks = [whole[f"rank{rank}"] for rank in range(group.size())]
    together: Saved = {}
    for name in dict.fromkeys(name for part in ranks for name in part["about"]):
        parts = [part for part in ranks if name in part["about"]]
        first, last = parts[0], parts[-1]
        entries = {}
        for key, values in first["memory"].items():
            if name in values:
                flat = torch.cat([part["memory"][key][name] for part in parts])
                entries[key] = known.to_checkpoint_layout({name: flat.view(known.shapes[name])})[
                    name
                ]
        end = last["about"][name]["end"]
        together[name] = {**first["about"][name], "end": end, "entries": entries}
    return together


def check(state: object, groups: Sequence[Mapping[str, Any]], known: Parameters) -> None:
    """Raises unless a state is one of ``ZeroOptimizer`` and fits the model and its groups.

    Args:
        groups: groups of this optimizer, as they would be saved.
        known: the model's parameters.

    Raises:
        CheckpointError: the state is foreign, newer, or of another model, groups or shards.
    """
    if not isinstance(state, Mapping) or any(field not in state for field in _FIELDS):
        raise CheckpointError(
            f"ZeroOptimizer.load_state_dict: takes what its state_dict() returned, with "
            f"{', '.join(_FIELDS)}; the state of a plain optimizer is not one"
        )
    if state["version"] not in (_VERSION - 1, _VERSION):
        raise CheckpointError(
            f"ZeroOptimizer.load_state_dict: version {state['version']!r} of the format, this "
            f"release reads up to {_VERSION}: update commhooks"
        )
    unit = state.get("unit", 1)
    if not isinstance(unit, int) or unit < 1:
        raise CheckpointError(
            f"ZeroOptimizer.load_state_dict: 'unit' is a number of entries, got {unit!r}; the "
            f"checkpoint is damaged"
        )
    placement = state.get("placement", [] if state["version"] == _VERSION else None)
    check_placement("ZeroOptimizer.load_state_dict", placement, known.placement, known.find)
    shapes = known.shapes
    wanted, saved = ([group["names"] for group in each] for each in (groups, state["groups"]))
    if wanted != saved:
        raise CheckpointError(
            f"ZeroOptimizer.load_state_dict: the state has {len(saved)} groups of other parameters "
            f"than the {len(wanted)} of this optimizer; make it with the same groups"
        )
    for name, piece in state["pieces"].items():
        numel = piece["end"] - piece["begin"]
        fits = name in shapes and piece["begin"] >= 0 and piece["end"] <= shapes[name].numel()
        if not fits or any(value.numel() != numel for value in piece["entries"].values()):
            raise CheckpointError(
                f"ZeroOptimizer.load_state_dict: {name!r} does not fit this model's parameter; is "
                f"the checkpoint another model's, or damaged?"
            )


def load_piece(
    piece: Piece, saved: Saved, known: Parameters, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes the exact values of a piece, and returns the optimizer's state of it.

    Args:
        settings: settings of the piece's group.

    Raises:
        CheckpointError: the state has no such entries.
    """
    saved_piece = saved.get(piece.name)
    begin, end = piece.entries.start, piece.entries.stop
    if saved_piece is None or begin < saved_piece["begin"] or saved_piece["end"] < end:
        raise CheckpointError(
            f"ZeroOptimizer.load_state_dict: entries {begin} to {end} of {piece.name!r} are not in "
            f"the state of this rank: on other ranks, or with other buckets, load what "
            f"state_dict(gather=True) returned"
        )
    span = slice(begin - saved_piece["begin"], end - saved_piece["begin"])
    entries = {
        key: known.to_bucket_layout({piece.name: value})[piece.name]
        .reshape(-1)[span]
        .to(piece.value.device)
        for key, value in saved_piece["entries"].items()
    }
    piece.value.detach().copy_(entries.pop("exact"))
    state = {key.removeprefix("state."): value.clone() for key, value in entries.items()}
    for key, value in saved_piece["rest"].items():
        state |= copied({key: value}, home_of(key, piece.value.device, settings))
    return state


def home_of(key: str, device: torch.device, settings: Mapping[str, Any]) -> torch.device:
    """Returns the device on which optimizers of torch keep a number of a parameter's state.

    Args:
        device: device of the parameter.
        settings: settings of the parameter's group.
    """
    on_device = key != "step" or settings.get("fused") or settings.get("capturable")
    return device if on_device else torch.device("cpu")
