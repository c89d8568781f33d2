"""The matrices of a bucket: where they lie, and which of them one strided view shows at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .runtime.arguments import whole

__all__ = ["Matrices", "OnDevice", "matrices_of", "on_device", "runs_of"]

_MOST = 2**62
_ROWS, _SEGMENT, _CHUNK, _TILE = 8, 512, 64, 128  # as in low_rank.h and low_rank.cu


class Matrices:
    """Where the matrices of a bucket lie, and their factors among all of them, in their order.

    Args:
        places: (offset in the bucket, rows, columns, rank) of each; they do not overlap.

    Attributes:
        left_numel, right_numel: entries of all left factors, and of all right ones.
        end: entries of the bucket up to where the last of them ends.
        table: what kernels read; a row of int64 for each, and one for the end of everything.

    Raises:
        TypeError, ValueError: a place is not four whole numbers of 0 or more, or two overlap.

    Example:
        >>> matrices = Matrices([(0, 512, 256, 4)])
        >>> matrices.left_numel, matrices.right_numel
        (2048, 1024)
    """

    def __init__(self, places: Sequence[tuple[int, int, int, int]]) -> None:
        places = _checked(places)
        lefts = [0, *accumulate(rank * rows for _, rows, _, rank in places)]
        rights = [0, *accumulate(rank * columns for _, _, columns, rank in places)]
        self.left_numel, self.right_numel = lefts[-1], rights[-1]
        rows, task, sums = [], [0, 0], [0, 0]
        for place, left, right in zip(places, lefts, rights, strict=False):
            _, n, m, rank = place
            segments, chunks = -(-m // _SEGMENT), -(-n // _CHUNK)
            rows.append((*place, left, right, task[0], sums[0], task[1], sums[1]))
            task = [task[0] + -(-n // _ROWS) * segments, task[1] + chunks * -(-m // _TILE)]
            sums = [sums[0] + segments * rank * n, sums[1] + chunks * rank * m]
        # As struct Matrix in low_rank.h.
        self.end = max((offset + n * m for offset, n, m, _ in places), default=0)
        rows.append((self.end, 0, 0, 0, lefts[-1], rights[-1], task[0], sums[0], task[1], sums[1]))
        self.table = torch.tensor(rows, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.table) - 1


def _checked(places: Sequence[Sequence[int]]) -> list[tuple[int, int, int, int]]:
    found = []
    for place in places:
        if len(place) != 4:
            raise ValueError(f"Matrices(places): offset, rows, columns, rank; got {place!r}")
        offset, rows, columns, rank = (whole("Matrices", "places", one) for one in place)
        if min(offset, rows, columns, rank) < 0 or offset + rows * columns > _MOST:
            raise ValueError(f"Matrices(places): numbers from 0 to 2^62, got {tuple(place)}")
        if rank * max(rows, columns) > _MOST:
            raise ValueError(f"Matrices(places): factors of less than 2^62, got {tuple(place)}")
        found.append((offset, rows, columns, rank))
    end = 0
    for offset, rows, columns, _ in sorted(one for one in found if one[1] * one[2]):
        if offset < end:
            raise ValueError(f"Matrices(places): they overlap at {offset}")
        end = offset + rows * columns
    return found


def _version_of(table: Tensor) -> int:
    """Changes where the table is written to; what is known of it holds for one version."""
    try:
        return table._version
    except RuntimeError:  # an inference tensor counts none
        return 0


_KNOWN: dict[int, tuple[Tensor, int, Matrices]] = {}  # by the table's id, which it keeps


def matrices_of(caller: str, table: Tensor) -> Matrices:
    """The matrices of a table; ValueError if it is none that ``Matrices`` made."""
    known, version = _KNOWN.get(id(table)), _version_of(table)
    if known is not None and known[0] is table and known[1] == version:
        return known[2]
    found = _read(table)
    if found is None:
        raise ValueError(
            f"{caller}(table): a table as Matrices makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    if len(_KNOWN) >= 4096:
        _KNOWN.clear()
    _KNOWN[id(table)] = table, version, found
    return found


def _read(table: Tensor) -> Matrices | None:
    width = len(Matrices([]).table[0])
    if table.device.type != "cpu" or table.dtype != torch.int64 or not table.is_contiguous():
        return None
    if table.dim() != 2 or not len(table) or table.shape[1] != width:
        return None
    try:
        found = Matrices(table[:-1, :4].tolist())
    except ValueError:
        return None
    return found if torch.equal(found.table, table) else None


class _Run(NamedTuple):
    """Matrices of one shape at constant distances: strided views show all of them at once."""

    matrices: int
    rows: int
    columns: int
    rank: int
    first: tuple[int, int, int]  # places of the first in the bucket and among the factors
    distance: tuple[int, int, int]

    def bucket(self, flat: Tensor) -> Tensor:
        """The matrices in a bucket, shape (matrices, rows, columns)."""
        return self._view(flat, 0, (self.rows, self.columns))

    def left(self, flat: Tensor) -> Tensor:
        """Their left factors, shape (matrices, rank, rows)."""
        return self._view(flat, 1, (self.rank, self.rows))

    def right(self, flat: Tensor) -> Tensor:
        """Their right factors, shape (matrices, rank, columns)."""
        return self._view(flat, 2, (self.rank, self.columns))

    def _view(self, flat: Tensor, which: int, shape: tuple[int, int]) -> Tensor:
        strides = (self.distance[which], shape[1], 1)
        begin = flat.storage_offset() + self.first[which]
        return flat.as_strided((self.matrices, *shape), strides, begin)


def runs_of(table: Tensor) -> tuple[_Run, ...]:
    """All matrices of a table, as few runs."""
    return _runs_of(table, _version_of(table))


@lru_cache(maxsize=4096)
def _runs_of(table: Tensor, version: int) -> tuple[_Run, ...]:
    alike: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for offset, rows, columns, rank, left, right in table[:-1, :6].tolist():
        alike.setdefault((rows, columns, rank), []).append((offset, left, right))
    return tuple(
        _Run(len(part), *shape, part[0], _step(part[0], part[1]) if len(part) > 1 else (0, 0, 0))
        for shape, places in alike.items()
        for part in _stretches(places)
    )


def _step(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return (b[0] - a[0], b[1] - a[1], b[2] - a[2])


def _stretches(places: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Splits places into stretches of constant distance, from the left."""
    part: list[tuple[int, int, int]] = []
    for place in places:
        if len(part) > 1 and _step(part[-1], place) != _step(part[0], part[1]):
            yield part
            part = []
        part.append(place)
    yield part


class OnDevice(NamedTuple):
    """A table on a GPU, and the sizes of launches that it asks for."""

    table: Tensor
    matrices: int
    lefts: int
    rights: int
    block_tasks: int
    block_sums: int
    chunk_tasks: int
    chunk_sums: int


def on_device(table: Tensor, device: torch.device) -> OnDevice:
    """The table there."""
    return _copied(table, _version_of(table), device)


@lru_cache(maxsize=4096)
def _copied(table: Tensor, version: int, device: torch.device) -> OnDevice:
    return OnDevice(table.to(device), len(table) - 1, *table[-1, 4:].tolist())
