"""Cuts a flat tensor into one shard per rank, and arranges shards as rows of a message."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["Span", "check_shards", "equal_shards", "from_rows", "to_rows"]

Span = tuple[int, int]


def equal_shards(n: int, count: int) -> tuple[Span, ...]:
    """Returns begin and end of ``count`` shards of ``n`` entries, a multiple of ``count``."""
    length = n // count
    return tuple((i * length, (i + 1) * length) for i in range(count))


def check_shards(shards: Sequence[Span], n: int, world_size: int) -> Sequence[Span]:
    """Returns the shards; raises ValueError unless they cover ``n`` entries, the first the longest.

    Args:
        shards: begin and end of the shard of each rank.
        n: number of entries of the flat tensor.
        world_size: number of ranks.
    """
    ends = [0, *(end for _, end in shards)]
    in_order = all(begin == before for (begin, _), before in zip(shards, ends, strict=False))
    lengths = [end - begin for begin, end in shards]
    if (
        len(shards) != world_size
        or not in_order
        or ends[-1] != n
        or min(lengths) < 0
        or max(lengths) > lengths[0]
    ):
        raise ValueError(
            f"shards=...: begin and end of one shard for each of {world_size} ranks, one after "
            f"the other over all {n} entries, the first being the longest; got {list(shards)[:8]}"
        )
    return shards


def to_rows(flat: Tensor, shards: Sequence[Span]) -> Tensor:
    """Returns shards as rows of equal length, filled up with zeros; a view where all are equal."""
    length = shards[0][1]
    if len(shards) * length == flat.numel():
        return flat.view(len(shards), length)
    rows = flat.new_zeros(len(shards), length)
    for row, (begin, end) in zip(rows, shards, strict=True):
        row[: end - begin] = flat[begin:end]
    return rows


def from_rows(rows: Tensor, shards: Sequence[Span]) -> Tensor:
    """Returns the flat tensor whose shards are rows; the inverse of :func:`to_rows`."""
    n = shards[-1][1]
    if rows.numel() == n:
        return rows.reshape(-1)
    flat = rows.new_empty(n)
    for row, (begin, end) in zip(rows, shards, strict=True):
        flat[begin:end] = row[: end - begin]
    return flat
