"""Describes the shard of each parameter that a rank trains, if parameters are DTensors.

Tensor-parallel ranks have memory of the same names and shapes, so only this description says to
which rank a state belongs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from commhooks.errors import CheckpointError

__all__ = [
    "ShardSpec",
    "check_placement",
    "read_placement",
    "shard_description",
    "shard_spec_of",
    "stored_placement",
]

_ALONG = re.compile(r" along dimension (\d{1,9})")


class ShardSpec(NamedTuple):
    """Describes the shard of a parameter that a rank trains, and the ranks of the other shards.

    Attributes:
        piece: the shard in words; "" for the whole parameter.
        shard_groups: groups of ranks between which the parameter is cut. Ranks of other groups have
            the same piece, and have to keep it equal.
    """

    piece: str = ""
    shard_groups: frozenset[tuple[int, ...]] = frozenset()


def shard_spec_of(spec: Any) -> ShardSpec:
    """Returns the shard spec of a parameter.

    Args:
        spec: see :func:`shard_description`.
    """
    if spec is None:
        return ShardSpec()
    shard_groups = frozenset(
        tuple(dist.get_process_group_ranks(spec.mesh.get_group(dim)))
        for dim, placement in enumerate(spec.placements)
        if spec.mesh.size(dim) > 1 and not placement.is_replicate()
    )
    return ShardSpec(shard_description(spec), shard_groups)


def shard_description(spec: Any) -> str:
    """Describes this rank's shard of a DTensor; "" for the whole parameter.

    Args:
        spec: placements and mesh of the DTensor, without the ranks that average; None if the
            parameter is a plain tensor.
    """
    if spec is None:
        return ""
    # In words of our own: what placements print may differ between releases of torch.
    return _in_order(
        f"piece {rank} of {size} {_cut(placement)}"
        for placement, rank, size in zip(
            spec.placements, spec.mesh.get_coordinate(), spec.mesh.shape, strict=True
        )
        if size > 1 and not placement.is_replicate()
    )


def _cut(placement: Any) -> str:
    """Describes the cut of a placement in words."""
    if not hasattr(placement, "dim"):
        return f"by {placement}"
    # Above 1 where a later dimension of the mesh cuts first (torch's ``_StridedShard``): the
    # pieces then are others than those of the same numbers without.
    stride = getattr(placement, "split_factor", 1)
    return f"along dimension {placement.dim}" + (f" in steps of {stride}" if stride > 1 else "")


def _in_order(pieces: Iterable[str]) -> str:
    """Joins texts of cuts, ordered by the parameter's dimension: meshes may be in any order.

    Cuts along one dimension keep their order, since each is within the piece of the one before.
    """

    def dimension(piece: str) -> int:
        match = _ALONG.search(piece)
        return -1 if match is None else int(match[1])

    return ", ".join(sorted(pieces, key=dimension))


def stored_placement(pieces: Mapping[str, str]) -> list[list[str]]:
    """Converts shards by parameter to lists of a shard and the names of its parameters."""
    names: dict[str, list[str]] = {}
    for name, piece in pieces.items():
        names.setdefault(piece, [piece]).append(name)
    return list(names.values())


def read_placement(stored: object, subject: str) -> dict[str, str]:
    """Inverts :func:`stored_placement`: returns shards by parameter.

    Args:
        subject: begins the message of an error.

    Raises:
        CheckpointError: ``stored`` is something else.
    """
    if type(stored) is not list or not all(
        type(entry) is list and entry and all(type(text) is str for text in entry)
        for entry in stored
    ):
        raise CheckpointError(f"{subject} is a list of lists of text; the file is damaged")
    # Earlier releases wrote them in the order of the mesh.
    ordered = [(_in_order(re.split(", (?=piece )", piece)), names) for piece, *names in stored]
    return {name: piece for piece, names in ordered for name in names}


def check_placement(
    call: str, stored: object, here: Mapping[str, str], find: Callable[[str], str]
) -> None:
    """Raises CheckpointError unless a state is of the shards that this rank trains.

    Args:
        call: the name of the public call.
        stored: result of :func:`stored_placement`; None: the state names no shards.
        here: this rank's pieces by parameter, of those that are cut.
        find: returns the name here of a parameter in the state.
    """
    if stored is None:
        return
    saved = read_placement(stored, f"{call}: 'placement'")
    saved = {find(name): piece for name, piece in saved.items()}
    for name in dict.fromkeys([*here, *saved]):
        if saved.get(name) != here.get(name):
            raise CheckpointError(
                f"{call}: the state is of another part of the model: of {name!r} it has "
                f"{saved.get(name, 'all of it')}, and this rank trains "
                f"{here.get(name, 'all of it')}. Beside tensor parallelism give each rank what "
                f"ranks with the same shards saved"
            )
