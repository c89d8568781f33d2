"""Divides a flat tensor into blocks that start at parameters, and places them in payloads.

The entries of a block share one scale, so a parameter with a small gradient would be lost in the
rounding errors of a neighbour in the same block. Here every segment (a parameter, or the part of a
parameter that lies in a shard) starts a block. The entries after a segment's last whole block, its
tail, are sent in 16 bits where that takes no more bytes than a block, and otherwise as a block that
is padded with zeros: a segment costs at most one block of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ._tables import once_per_table

__all__ = ["Segments", "rows_of", "segments_of"]

_MIN_BLOCK = 256  # entries that share calls of Philox, and that a warp takes at least

Run = tuple[int, int, int]  # slot, begin, count: see Segments.runs


class Segments:
    """Describes where the entries of a flat tensor lie in a message, which has a row per shard.

    Entries of whole blocks are coded, and lie in slots; all rows have the same number of slots.
    Slots without an entry are coded as zeros. Entries of 16 bits follow the codes of their row.

    Args:
        rows: for each row the lengths of its segments; all rows together are the flat tensor.
        granule: alignment of segments in slots: a multiple of 256 and of the block size.
        most: the largest tail of a segment that is sent in 16 bits; 0: none.

    Attributes:
        slots, tails: number of slots, and of entries of 16 bits, of a row.
        entries: where each row begins in the flat tensor, and where the last one ends.
        runs: for each row a list of (slot, begin, count): ``count`` entries of the row from
            ``begin`` on lie in the slots from ``slot`` on.
        tail_runs: the same for entries of 16 bits.
        table: what kernels read: int64, with four columns. Its lines are (rows, granule, most,
            slots); for each row, and once more at the end, the numbers of (runs, tail runs,
            entries, segments) before it; then all runs, all tail runs, and all segment lengths.

    Example:
        >>> segments = Segments([[300, 20]], granule=256, most=130)
        >>> segments.runs, segments.tail_runs
        ([[(0, 0, 256)]], [[(0, 256, 64)]])
    """

    def __init__(self, rows: Sequence[Sequence[int]], granule: int, most: int) -> None:
        self.rows, self.granule, self.most = [tuple(row) for row in rows], granule, most
        if granule < _MIN_BLOCK or granule % _MIN_BLOCK or not 0 <= most < granule:
            raise ValueError(
                f"Segments(granule, most): a multiple of {_MIN_BLOCK} and a number below it, "
                f"got {granule} and {most}"
            )
        if not self.rows or min(map(min, filter(None, self.rows)), default=0) < 0:
            raise ValueError("Segments(rows): one row or more, of lengths of 0 or more")
        self.runs: list[list[Run]] = []
        self.tail_runs: list[list[Run]] = []
        self.entries = [0]
        self.slots = self.tails = 0
        for row in self.rows:
            slots, tails = self._add_row(row)
            self.slots, self.tails = max(self.slots, slots), max(self.tails, tails)
            self.entries.append(self.entries[-1] + sum(row))
        if self.entries[-1] >= 2**56:
            raise ValueError(f"Segments(rows): less than 2^56 entries, got {self.entries[-1]}")
        self.table = self._table()

    def _add_row(self, row: tuple[int, ...]) -> tuple[int, int]:
        """Adds the runs of a row; returns its numbers of slots and of entries of 16 bits."""
        runs: list[Run] = []
        tail_runs: list[Run] = []
        slots = tails = begin = 0
        for length in row:
            tail = length % self.granule
            coded = length - tail if tail <= self.most else length
            slots += _append(runs, (slots, begin, coded), self.granule)
            tails += _append(tail_runs, (tails, begin + coded, length - coded), 1)
            begin += length
        self.runs.append(runs)
        self.tail_runs.append(tail_runs)
        return slots, tails

    def _table(self) -> Tensor:
        lines = [(len(self.rows), self.granule, self.most, self.slots)]
        runs = tail_runs = segments = 0
        for index, row in enumerate(self.rows):
            lines.append((runs, tail_runs, self.entries[index], segments))
            runs += len(self.runs[index])
            tail_runs += len(self.tail_runs[index])
            segments += len(row)
        lines.append((runs, tail_runs, self.entries[-1], segments))
        for rows in (self.runs, self.tail_runs):
            lines += [(*run, 0) for row in rows for run in row]
        lines += [(length, 0, 0, 0) for row in self.rows for length in row]
        return torch.tensor(lines, dtype=torch.int64, device="cpu")

    @classmethod
    def from_table(cls, table: Tensor) -> Segments | None:
        """Returns the segments of this table, or None if ``Segments`` makes no such table."""
        if not table.is_cpu or table.dtype != torch.int64 or not table.is_contiguous():
            return None
        if table.dim() != 2 or len(table) < 3 or table.shape[1] != 4:
            return None
        count, granule, most, _ = table[0].tolist()
        if not 1 <= count < len(table) - 1:
            return None
        ends = table[1 : count + 2, 3].tolist()
        lengths = table[len(table) - ends[-1] :, 0].tolist() if 0 <= ends[-1] < len(table) else []
        try:
            segments = cls([lengths[a:b] for a, b in pairwise(ends)], granule, most)
        except ValueError:
            return None
        return segments if torch.equal(segments.table, table) else None

    def row(self, index: int) -> tuple[int, int]:
        """Returns where a row begins and ends in the flat tensor; -1: all rows together."""
        return (
            (0, self.entries[-1]) if index < 0 else (self.entries[index], self.entries[index + 1])
        )

    # ---- for the definitions of ops in PyTorch: indices in place of runs

    def coded(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the slots of a row that have entries, and the indices of these in the row."""
        return self._indices[index][0].to(device), self._indices[index][1].to(device)

    def counts(self, index: int, block: int, device: torch.device) -> Tensor:
        """Returns the number of entries in each block of a row, as float32."""
        slots = torch.zeros(self.slots, dtype=torch.float32, device=device)
        slots[self.coded(index, device)[0]] = 1.0
        return slots.view(-1, block).sum(1)

    def in_16_bits(self, index: int, device: torch.device) -> Tensor:
        """Returns the indices of a row's entries that are sent in 16 bits."""
        return self._indices[index][2].to(device)

    @cached_property
    def _indices(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [
            (
                _ranges([(slot, slot + count) for slot, _, count in runs]),
                _ranges([(begin, begin + count) for _, begin, count in runs]),
                _ranges([(begin, begin + count) for _, begin, count in tail_runs]),
            )
            for runs, tail_runs in zip(self.runs, self.tail_runs, strict=True)
        ]


def _append(runs: list[Run], run: Run, unit: int) -> int:
    """Appends a run, or extends the last one; returns ``count``, rounded up to whole units."""
    slot, begin, count = run
    if count:
        last = runs[-1] if runs else (0, 0, 0)
        if last[2] and last[0] + last[2] == slot and last[1] + last[2] == begin:
            runs[-1] = (last[0], last[1], last[2] + count)
        else:
            runs.append(run)
    return -(-count // unit) * unit


def _ranges(spans: Sequence[tuple[int, int]]) -> Tensor:
    parts = [torch.arange(begin, end, device="cpu") for begin, end in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def rows_of(segments: Segments, row: int) -> list[tuple[int, int, int]]:
    """Returns the rows that an op works on: (row, begin, end) with its entries in the op's tensor.

    Args:
        row: a row, whose entries are all of the tensor; -1: all rows.
    """
    if row >= 0:
        begin, end = segments.row(row)
        return [(row, 0, end - begin)]
    return [(index, *segments.row(index)) for index in range(len(segments.rows))]


@once_per_table
def segments_of(table: Tensor, caller: str) -> Segments:
    """Returns the segments of a table; raises ValueError unless ``Segments`` can make that table.

    Kernels trust the table for every address, and an op may be called with any tensor.
    """
    segments = Segments.from_table(table)
    if segments is None:
        raise ValueError(
            f"{caller}(segments): a table as Segments makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return segments
