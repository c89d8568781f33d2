"""Fits a saved state to the parameters, or the pieces of parameters, that the hook's host has."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from commhooks.checkpoint.form import MemoryDict, Saved
from commhooks.checkpoint.pieces import of_one_group
from commhooks.checkpoint.ranks import parts_of_group
from commhooks.core.names import is_padding, piece_of, whole_name
from commhooks.core.scheme import Scheme, slots_of
from commhooks.core.user_line import user_line
from commhooks.hook.running import Running
from commhooks.wrappers.feedback import RESIDUAL_SLOT

__all__ = ["Kept", "as_kept", "as_saved", "carried", "needs_joining", "resharded"]


class Kept(NamedTuple):
    """Describes one value of a saved state; ``leader`` tells its group of ranks."""

    leader: int
    key: str
    name: str
    shape: torch.Size


def carried(hook: Running, scheme: Scheme) -> set[str]:
    """Returns the keys whose values are saved by whole parameter, as any host loads them."""
    # A residual of any scheme: it may be flushed.
    slots = (RESIDUAL_SLOT, *slots_of(scheme))
    return {slot.key for slot in slots if hook._parameters.carries(slot)}


def as_saved(hook: Running, scheme: Scheme, memory: MemoryDict) -> MemoryDict:
    """Returns memory in the form in which states hold it."""
    whole, known = carried(hook, scheme), hook._parameters
    return {
        key: known.as_saved(values) if key in whole else values for key, values in memory.items()
    }


def as_kept(hook: Running, scheme: Scheme, memory: MemoryDict) -> MemoryDict:
    """Returns the memory of a state in the form in which this rank's buckets hold it."""
    whole, known = carried(hook, scheme), hook._parameters
    return {
        key: known.as_kept(values) if key in whole else known.of_here(values)
        for key, values in memory.items()
    }


def needs_joining(hook: Running, scheme: Scheme, kept: Iterable[Kept], leader: int) -> bool:
    """Whether a state has pieces of parameters that are cut in another way here.

    Args:
        kept: all values of the state.
        leader: the smallest global rank of the hook's group.
    """
    whole, here = carried(hook, scheme), hook._parameters.shapes
    # A hook within nodes knows pieces of these names, too, but saves and loads whole parameters.
    if hook._binding.shards is None:
        here = {}
    pieces = [one for one in kept if one.key in whole and piece_of(one.name)[1] is not None]
    if len({one.leader for one in pieces}) > 1:
        own = [one for one in pieces if one.leader == leader]
    else:
        own = pieces
    return bool(pieces) and not (own and all(here.get(one.name) == one.shape for one in own))


def resharded(hook: Running, scheme: Scheme, saved: Saved, leader: int) -> tuple[Saved, set[str]]:
    """Returns a state of whole parameters, or of the pieces here, and keys that begin anew.

    A value without the shape of its parameter (a factor, packed bytes) belongs to one piece. Cut
    in another way nobody can use it, so it is left out, with a warning.

    Args:
        leader: the smallest global rank of the hook's group.

    Raises:
        CheckpointError: pieces are missing.
    """
    known, whole = hook._parameters, carried(hook, scheme)
    kept = (
        Kept(part.leader, key, name, value.shape)
        for part in saved.parts
        for key, values in part.memory.items()
        for name, value in values.items()
    )
    if needs_joining(hook, scheme, kept, leader):
        saved = of_one_group(saved, known.saved_shapes, whole)
    here = set(map(whole_name, known.shapes))
    names: dict[str, set[str]] = {}
    for part in parts_of_group(saved.parts, leader).values():
        for key in part.memory.keys() - whole:
            own = {name for name in part.memory[key] if not is_padding(name)}
            names.setdefault(key, set()).update(own)
    foreign = {
        key
        for key, theirs in names.items()
        if not known.takes(theirs) and set(map(whole_name, theirs)) <= here
    }
    if foreign:
        _tell(hook, sorted(foreign))
        keys = {key for part in saved.parts for key in part.memory}
        saved = saved.with_keys(sorted(keys - foreign))
    return saved, foreign


def _tell(hook: Running, foreign: list[str]) -> None:
    if hook._engine.rank == 0:
        warnings.warn(
            f"commhooks: the state was saved on another mesh or host, where {foreign} belonged to "
            f"other pieces of the parameters: that begins anew. Residuals, momenta and all else "
            f"that is shaped as the parameters is carried over",
            RuntimeWarning,
            stacklevel=user_line(),
        )
