"""Describes the matrices of a bucket: their places, and views of many matrices at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._tables import once_per_table
from .runtime.arguments import whole

__all__ = ["Matrices", "OnDevice", "Run", "matrices_of", "on_device", "runs_of", "table_of"]

_MOST = 2**62  # places are int64
_ROWS, _SEGMENT, _CHUNK, _TILE = 8, 512, 64, 64  # as in low_rank.h and low_rank.cu


class Matrices:
    """Lists where the matrices of a bucket lie; their factors lie one after the other, in order.

    Args:
        places: (offset in the bucket, rows, columns, rank) per matrix, without overlaps.
        end: where the last matrix in the bucket ends, if its last row is short: the entries that it
            lacks are zeros, which are neither read nor written. None: no row is short.

    Attributes:
        left_numel, right_numel: number of entries of all left and of all right factors.
        end: the end of the last matrix in the bucket.
        table: int64, one row per matrix and a last one with the ends; kernels read it.

    Raises:
        TypeError: a place has a number that is no integer.
        ValueError: a place is not four numbers of 0 or more, or two matrices overlap.

    Example:
        >>> matrices = Matrices([(0, 512, 256, 4)])
        >>> matrices.left_numel, matrices.right_numel
        (2048, 1024)
    """

    def __init__(self, places: Sequence[tuple[int, int, int, int]], end: int | None = None) -> None:
        places = _checked(places)
        lefts = [0, *accumulate(rank * rows for _, rows, _, rank in places)]
        rights = [0, *accumulate(rank * columns for _, _, columns, rank in places)]
        self.left_numel, self.right_numel = lefts[-1], rights[-1]
        # Tasks and partial sums of a GPU are counted here, once per table: a warp then finds its
        # piece of a matrix by a binary search, and a launch knows its size without a copy to the
        # host.
        rows, task, sums = [], [0, 0], [0, 0]
        for place, left, right in zip(places, lefts, rights, strict=False):
            _, n, m, rank = place
            segments, chunks = -(-m // _SEGMENT), -(-n // _CHUNK)
            rows.append((*place, left, right, task[0], sums[0], task[1], sums[1]))
            task = [task[0] + -(-n // _ROWS) * segments, task[1] + chunks * -(-m // _TILE)]
            sums = [sums[0] + segments * rank * n, sums[1] + chunks * rank * m]
        ends = ((at + n * m, m if n else 0) for at, n, m, _ in places)
        self.end, row = max(ends, default=(0, 0))
        if end is not None and end != self.end:
            if not self.end - row < whole("Matrices", "end", end) < self.end:
                raise ValueError(f"Matrices(end): in the last row of the last matrix, got {end}")
            self.end = end
        # The columns of struct Matrix in low_rank.h. Launches take their sizes from the last row.
        rows.append((self.end, 0, 0, 0, lefts[-1], rights[-1], task[0], sums[0], task[1], sums[1]))
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu")

    def __len__(self) -> int:
        return len(self.table) - 1


def _checked(places: Sequence[Sequence[int]]) -> list[tuple[int, int, int, int]]:
    checked = []
    for place in places:
        if len(place) != 4:
            raise ValueError(f"Matrices(places): offset, rows, columns, rank; got {place!r}")
        offset, rows, columns, rank = (whole("Matrices", "places", number) for number in place)
        if min(offset, rows, columns, rank) < 0 or offset + rows * columns > _MOST:
            raise ValueError(f"Matrices(places): numbers from 0 to 2^62, got {tuple(place)}")
        if rank * max(rows, columns) > _MOST:
            raise ValueError(f"Matrices(places): factors of less than 2^62, got {tuple(place)}")
        checked.append((offset, rows, columns, rank))
    # Empty matrices may lie anywhere. The others are compared in the order of their offsets, while
    # the result keeps the order that was given, which is the order of the factors.
    end = 0
    for offset, rows, columns, _ in sorted(place for place in checked if place[1] * place[2]):
        if offset < end:
            raise ValueError(f"Matrices(places): they overlap at {offset}")
        end = offset + rows * columns
    return checked


def table_of(caller: str, matrices: Matrices) -> Tensor:
    """Returns the table, which ops take: a schema of torch.library has no type for `Matrices`."""
    if not isinstance(matrices, Matrices):
        raise TypeError(f"{caller}(matrices): Matrices, got {type(matrices).__name__}")
    return matrices.table


@once_per_table
def matrices_of(table: Tensor, caller: str) -> Matrices:
    """Returns the matrices of a table; raises ValueError unless ``Matrices`` can make that table.

    Kernels trust the table for every address, and an op may be called with any tensor.
    """
    matrices = _read(table)
    if matrices is None:
        raise ValueError(
            f"{caller}(table): a table as Matrices makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return matrices


def _read(table: Tensor) -> Matrices | None:
    width = len(Matrices([]).table[0])
    if table.device.type != "cpu" or table.dtype != torch.int64 or not table.is_contiguous():
        return None
    if table.dim() != 2 or not len(table) or table.shape[1] != width:
        return None
    # The first four columns determine the others, which must be equal as well.
    try:
        matrices = Matrices(table[:-1, :4].tolist(), int(table[-1, 0]))
    except ValueError:
        return None
    return matrices if torch.equal(matrices.table, table) else None


class Run(NamedTuple):
    """Describes matrices of one shape at constant distances, which views take as one batch.

    A batched product (``bmm``) over a view costs one call for all of them and copies nothing.
    """

    matrices: int
    rows: int
    columns: int
    rank: int
    first: tuple[int, int, int]  # place of the first matrix, its left and its right factor
    distance: tuple[int, int, int]
    end: int  # of all matrices in the bucket

    def read(self, flat: Tensor) -> Tensor:
        """Returns the matrices in a bucket, shape (matrices, rows, columns)."""
        return self._view(self._padded(flat), 0, (self.rows, self.columns))

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Writes the matrices in a bucket."""
        padded = self._padded(flat)
        self._view(padded, 0, (self.rows, self.columns)).copy_(values)
        if padded is not flat:
            flat[: self.end] = padded[: self.end]

    def _padded(self, flat: Tensor) -> Tensor:
        """Returns a bucket with the zeros that a short row lacks; itself if no row is short."""
        size = self.rows * self.columns
        end = self.first[0] + (self.matrices - 1) * self.distance[0] + size
        return flat if end <= self.end or not size else pad(flat[: self.end], (0, end - self.end))

    def left(self, flat: Tensor) -> Tensor:
        """Returns the left factors, shape (matrices, rank, rows)."""
        return self._view(flat, 1, (self.rank, self.rows))

    def right(self, flat: Tensor) -> Tensor:
        """Returns the right factors, shape (matrices, rank, columns)."""
        return self._view(flat, 2, (self.rank, self.columns))

    def _view(self, flat: Tensor, which: int, shape: tuple[int, int]) -> Tensor:
        strides = (self.distance[which], shape[1], 1)
        # as_strided counts from the storage, where a flat view of a larger tensor begins later.
        begin = flat.storage_offset() + self.first[which]
        return flat.as_strided((self.matrices, *shape), strides, begin)


@once_per_table
def runs_of(table: Tensor) -> tuple[Run, ...]:
    """Returns runs that cover all matrices of a table, as few as their order allows."""
    end = int(table[-1, 0])
    by_shape: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for offset, rows, columns, rank, left, right in table[:-1, :6].tolist():
        by_shape.setdefault((rows, columns, rank), []).append((offset, left, right))
    return tuple(
        Run(len(part), *shape, part[0], _step(*part[:2]) if len(part) > 1 else (0, 0, 0), end)
        for shape, places in by_shape.items()
        for part in _stretches(places)
    )


def _step(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return (b[0] - a[0], b[1] - a[1], b[2] - a[2])


def _stretches(places: list[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Splits places into stretches of constant distance, each as long as possible."""
    part: list[tuple[int, int, int]] = []
    for place in places:
        if len(part) > 1 and _step(part[-1], place) != _step(part[0], part[1]):
            yield part
            part = []
        part.append(place)
    yield part


class OnDevice(NamedTuple):
    """Holds a table on a GPU, and the sizes of the launches for it."""

    table: Tensor
    matrices: int
    lefts: int
    rights: int
    block_tasks: int
    block_sums: int
    chunk_tasks: int
    chunk_sums: int


@once_per_table
def on_device(table: Tensor, device: torch.device) -> OnDevice:
    """Returns the table on ``device``, copied once per table and device."""
    # Read from the host's table: reading the copy would wait for the GPU.
    return OnDevice(table.to(device), len(table) - 1, *table[-1, 4:].tolist())
