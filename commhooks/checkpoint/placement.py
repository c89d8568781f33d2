"""Tells which piece of each parameter a rank trains, where parameters are DTensors.

Ranks of tensor parallelism have memory of the same names and shapes, so nothing else tells whose a
state is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commhooks.errors import CheckpointError

__all__ = ["piece_here", "read_placement", "stored_placement"]


def piece_here(spec: Any) -> str:
    """Returns which piece of a parameter a DTensor's spec gives to this rank; "" for all of it.

    Args:
        spec: placements and mesh of the DTensor, without the ranks that average; None if the
            parameter is a plain tensor.
    """
    if spec is None:
        return ""
    # In words of our own: what placements print may differ between releases of torch.
    return ", ".join(
        f"piece {rank} of {size} "
        + (f"along dimension {one.dim}" if hasattr(one, "dim") else f"by {one}")
        for one, rank, size in zip(
            spec.placements, spec.mesh.get_coordinate(), spec.mesh.shape, strict=True
        )
        if size > 1 and not one.is_replicate()
    )


def stored_placement(pieces: Mapping[str, str]) -> list[list[str]]:
    """Returns pieces by parameter as lists of a piece and the names of its parameters."""
    names: dict[str, list[str]] = {}
    for name, piece in pieces.items():
        names.setdefault(piece, [piece]).append(name)
    return list(names.values())


def read_placement(stored: object, field: str, call: str) -> dict[str, str]:
    """Returns pieces by parameter; none from a state that does not tell.

    Raises:
        CheckpointError: ``stored`` is not what ``stored_placement`` returned.
    """
    groups = [] if stored is None else stored
    if type(groups) is not list or not all(
        type(one) is list and one and all(type(text) is str for text in one) for one in groups
    ):
        raise CheckpointError(
            f"{call}: 'placement' of {field!r} is a list of lists of text; the file is damaged"
        )
    return {name: piece for piece, *names in groups for name in names}
