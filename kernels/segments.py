"""Divides a flat tensor into blocks that begin at parameters, and places them in payloads.

A block shares one scale, so a parameter whose gradient is small would drown in the rounding errors
of a neighbour in the same block. Here every segment, as a parameter or the part of it that lies in
a shard, begins a block. What remains of a segment behind its whole blocks travels in 16 bits where
that takes no more bytes than a block, and otherwise as a block that zeros fill up: a segment costs
one block of padding at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ._tables import once_per_table

__all__ = ["Segments", "rows_of", "segments_of"]

_GROUP = 256  # entries that share calls of Philox, and that a warp takes at least

Run = tuple[int, int, int]


class Segments:
    """Lists where the entries of a message lie: a row of bytes for each shard of a flat tensor.

    Coded entries lie in slots, of which every row has the same number: whole blocks. Slots that no
    entry has are coded as zeros. Entries of 16 bits lie one after the other behind the codes.

    Args:
        rows: for each row the lengths of its segments; together they are the flat tensor.
        granule: a multiple of 256 and of the block; runs of slots begin at multiples of it.
        most: the largest rest of a segment that travels in 16 bits; 0: none.

    Attributes:
        slots, tails: coded entries and entries of 16 bits that a row has room for.
        entries: begin of each row in the flat tensor, and the end.
        runs: for each row (slot, begin, count): ``count`` entries from ``begin`` on, in the slots
            from ``slot`` on. Begins are those in the row.
        tail_runs: the same for entries of 16 bits.
        table: int64, four columns: (rows, granule, most, slots), for each row and behind the last
            the numbers before it of (runs, tail runs, entries, segments); all runs, all tail runs
            and all segments. Kernels read it.

    Example:
        >>> segments = Segments([[300, 20]], granule=256, most=130)
        >>> segments.runs, segments.tail_runs
        ([[(0, 0, 256)]], [[(0, 256, 64)]])
    """

    def __init__(self, rows: Sequence[Sequence[int]], granule: int, most: int) -> None:
        self.rows, self.granule, self.most = [tuple(row) for row in rows], granule, most
        if granule < _GROUP or granule % _GROUP or not 0 <= most < granule:
            raise ValueError(
                f"Segments(granule, most): a multiple of {_GROUP} and a number below it, "
                f"got {granule} and {most}"
            )
        if not self.rows or min(map(min, filter(None, self.rows)), default=0) < 0:
            raise ValueError("Segments(rows): one row or more, of lengths of 0 or more")
        self.runs: list[list[Run]] = []
        self.tail_runs: list[list[Run]] = []
        self.entries = [0]
        self.slots = self.tails = 0
        for row in self.rows:
            slots, tails = self._place(row)
            self.slots, self.tails = max(self.slots, slots), max(self.tails, tails)
            self.entries.append(self.entries[-1] + sum(row))
        if self.entries[-1] >= 2**56:
            raise ValueError(f"Segments(rows): less than 2^56 entries, got {self.entries[-1]}")
        self.table = self._table()

    def _place(self, row: tuple[int, ...]) -> tuple[int, int]:
        """Adds the runs of a row; returns its slots and its entries of 16 bits."""
        runs: list[Run] = []
        tail_runs: list[Run] = []
        slots = tails = begin = 0
        for length in row:
            rest = length % self.granule
            coded = length - rest if rest <= self.most else length
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
    def read(cls, table: Tensor) -> Segments | None:
        """Returns the segments that have this table, or None if none have."""
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
        """Returns the begin and the end of a row in the flat tensor; of -1 those of all rows."""
        return (
            (0, self.entries[-1]) if index < 0 else (self.entries[index], self.entries[index + 1])
        )

    # For definitions: indices in place of runs.

    def coded(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the slots that have entries in a row, and these entries."""
        return self._indices[index][0].to(device), self._indices[index][1].to(device)

    def counts(self, index: int, block: int, device: torch.device) -> Tensor:
        """Returns the number of entries in each block of a row, as float32."""
        slots = torch.zeros(self.slots, dtype=torch.float32, device=device)
        slots[self.coded(index, device)[0]] = 1.0
        return slots.view(-1, block).sum(1)

    def in_16_bits(self, index: int, device: torch.device) -> Tensor:
        """Returns the entries of a row that travel in 16 bits."""
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
    """Appends a run, or makes the last one longer; returns its size, in whole units."""
    place, begin, count = run
    if count:
        last = runs[-1] if runs else (0, 0, 0)
        if last[2] and last[0] + last[2] == place and last[1] + last[2] == begin:
            runs[-1] = (last[0], last[1], last[2] + count)
        else:
            runs.append(run)
    return -(-count // unit) * unit


def _ranges(spans: Sequence[tuple[int, int]]) -> Tensor:
    parts = [torch.arange(begin, end, device="cpu") for begin, end in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def rows_of(segments: Segments, row: int) -> list[tuple[int, int, int]]:
    """Returns the rows that an op works on, with the begin and end of their entries in its tensor.

    Args:
        row: one row, whose entries are the whole tensor; -1: all.
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
    segments = Segments.read(table)
    if segments is None:
        raise ValueError(
            f"{caller}(segments): a table as Segments makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return segments
