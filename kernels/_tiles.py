"""Cuts a bucket into tiles of 64 x 64 entries: large matrices, and a line of all other entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._tables import once_per_table

__all__ = ["SIDE", "TILE", "Tiles", "tiles_of"]

SIDE = 64  # of a tile
TILE = SIDE * SIDE


class _Run(NamedTuple):
    """Describes a matrix that is cut into squares, or a piece of the line.

    Attributes:
        begin: its first entry in the bucket.
        rows, columns: its shape.
        first: its first tile, or its first place in the line.
    """

    begin: int
    rows: int
    columns: int
    first: int


class Tiles:
    """Lists the tiles of a bucket: squares of matrices first, then parts of the line.

    A matrix of 64 x 64 and above is cut into squares, whose edges are padded with zeros. All other
    parameters are joined in one line, which is cut into runs of 4096 entries.

    Args:
        shapes: rows and columns of each parameter, in the order of the bucket.

    Attributes:
        numel: the number of entries of the bucket.
        squares, count: the numbers of squares, and of all tiles.
        table: what kernels read: int64. The first row has the numbers of matrices, of pieces of the
            line, of squares and of tiles. Then each matrix and each piece has a row: its begin in
            the bucket, rows, columns, and its first tile or its first place in the line.

    Example:
        >>> Tiles([(128, 100), (1, 100)]).count
        5
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.matrices: list[_Run] = []
        self.pieces: list[_Run] = []
        place = line = tile = 0
        for rows, columns in shapes:
            if min(rows, columns) < 0 or rows * columns > 2**56:
                raise ValueError(f"Tiles(shapes): 0 to 2^56 entries, got {rows} x {columns}")
            n = rows * columns
            if min(rows, columns) >= SIDE:
                self.matrices.append(_Run(place, rows, columns, tile))
                tile += -(-rows // SIDE) * -(-columns // SIDE)
            elif n:
                last = self.pieces[-1] if self.pieces else _Run(-1, 1, 0, 0)
                if last.begin + last.columns == place:  # without a gap
                    self.pieces[-1] = last._replace(columns=last.columns + n)
                else:
                    self.pieces.append(_Run(place, 1, n, line))
                line += n
            place += n
        self.numel, self.squares, self.count = place, tile, tile - -line // TILE
        head = (len(self.matrices), len(self.pieces), self.squares, self.count)
        rows_of_table = [head, *self.matrices, *self.pieces]
        self.table = torch.tensor(rows_of_table, dtype=torch.int64, device="cpu")

    def cut(self, flat: Tensor) -> Tensor:
        """Returns the entries of a bucket by tile: shape (tiles, 64, 64)."""
        grids = []
        for begin, rows, columns, _ in self.matrices:
            matrix = flat[begin : begin + rows * columns].view(rows, columns)
            padded = pad(matrix, (0, -columns % SIDE, 0, -rows % SIDE))
            grid = padded.view(-(-rows // SIDE), SIDE, -(-columns // SIDE), SIDE)
            grids.append(grid.transpose(1, 2).reshape(-1, SIDE, SIDE))
        line = torch.cat([flat[:0], *(flat[run.begin :][: run.columns] for run in self.pieces)])
        return torch.cat([*grids, pad(line, (0, -len(line) % TILE)).view(-1, SIDE, SIDE)])

    def joined(self, tiles: Tensor) -> Tensor:
        """Returns the bucket that :meth:`cut` has cut into these tiles."""
        flat, line = tiles.new_empty(self.numel), tiles[self.squares :].reshape(-1)
        for begin, rows, columns, first in self.matrices:
            down, across = -(-rows // SIDE), -(-columns // SIDE)
            grid = tiles[first : first + down * across].view(down, across, SIDE, SIDE)
            padded = grid.transpose(1, 2).reshape(down * SIDE, across * SIDE)
            flat[begin : begin + rows * columns] = padded[:rows, :columns].reshape(-1)
        for begin, _, columns, first in self.pieces:
            flat[begin : begin + columns] = line[first : first + columns]
        return flat


@once_per_table
def tiles_of(table: Tensor, caller: str) -> Tiles:
    """Returns the tiles of a table; raises ValueError unless ``Tiles`` can make that table.

    Kernels trust the table for every address, and an op may be called with any tensor.
    """
    good = table.is_cpu and table.dtype == torch.int64 and table.is_contiguous()
    tiles = _read(table) if good else None
    if tiles is None:
        raise ValueError(
            f"{caller}(table): a table as Tiles makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return tiles


def _read(table: Tensor) -> Tiles | None:
    if table.dim() != 2 or not len(table) or table.shape[1] != 4:
        return None
    # In the order of the bucket, which has no gaps.
    shapes = [(rows, columns) for _, rows, columns, _ in sorted(table[1:].tolist())]
    try:
        tiles = Tiles(shapes)
    except ValueError:
        return None
    return tiles if torch.equal(tiles.table, table) else None
