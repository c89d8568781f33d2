"""Computes how many entries of a bucket a sparse scheme sends."""

from __future__ import annotations

from commhooks.core._scheme import Scheme

__all__ = ["check_ratio", "number_kept"]


def check_ratio(scheme: Scheme, ratio: float) -> None:
    """Raises ValueError unless ``ratio`` is a share of the entries."""
    if not 0 < ratio <= 1:
        name = type(scheme).__name__
        raise ValueError(
            f"{name}(ratio=...) is a share of the entries, 0 < ratio <= 1, got {ratio!r}"
        )


def number_kept(ratio: float, n: int) -> int:
    """Returns how many of ``n`` entries are sent; at least one."""
    return min(n, max(1, int(ratio * n)))
