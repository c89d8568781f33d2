"""Computes norms, hashes and sketches of the gradients of a bucket, and hashes of parameters.

A sketch of a vector is a shorter vector: each of its numbers is the sum of some entries with random
signs. Its norm is that of the vector, up to some percent, and the mean of the sketches of several
ranks is the sketch of their mean. Entries lie in lines of as many columns as the sketch has
numbers. A task adds up 32 columns of 32 lines, and is the work of a warp.

Source: the tug-of-war sketch of Alon, Matias and Szegedy (1996); in disjoint parts, as by Charikar,
Chen and Farach-Colton (2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ._tables import on_device, once_per_table
from .levels import summed
from .parts import parts_of, parts_of_sizes
from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, op, wide

__all__ = ["ROWS", "fingerprint", "hash_parts", "pieces_of_sizes", "sketch_width"]

# What is known of each parameter: the squared norms of this rank's contribution, of the average, of
# the residual (twice the sum of that before the step and that after it), and of the contribution
# minus the average; and the hash of the average.
ROWS = ("gradient", "mean", "residual", "difference", "hash")

_WIDTHS = (1024, 512, 256, 128, 64)  # numbers of a sketch
_ENTRIES = 64  # per number, at least, in all but the narrowest
_SLICE, _LANES = 32, 32  # lines and columns of a task
_SQUARES = 5  # sums of squares of a task
Number = TypeVar("Number", int, Tensor)
_WORD = 0xFFFFFFFF


def sketch_width(size: int) -> int:
    """Returns the length of the sketch of a vector of ``size`` entries.

    The standard deviation of the norm is 1 / sqrt(2 * width) of it: 9 % where it is 64, and 2 %
    where it is 1024. The norm is exact where each entry has a number of its own.
    """
    return next((width for width in _WIDTHS if size >= _ENTRIES * width), min(size, _WIDTHS[-1]))


class Pieces:
    """Lists the pieces of a flat tensor that have a sketch each, and the parameters that own them.

    Args:
        sizes: numbers of entries of the pieces.
        owners: for each piece the number of its parameter, or -1. Default: piece i is parameter i.

    Attributes:
        numel, count, owner_count: how many entries, pieces and parameters there are.
        width, tasks, blocks: how many numbers the sketches of all pieces have, how many tasks there
            are, and how many blocks of 32 numbers.
        table: what kernels read: int64, of four columns. The first line is (count, owner_count, 0,
            0). Then each piece has a line: how many entries, numbers of sketches, tasks and blocks
            the pieces before it have; one more line has the totals. Then each parameter has a line
            that begins with how many pieces the parameters before it have; one more line has the
            total. The last lines begin with the pieces of the first parameter, of the second, and
            so on.

    Example:
        >>> Pieces([300, 20]).table[1:4, 1].tolist()
        [0, 64, 84]
    """

    def __init__(self, sizes: Sequence[int], owners: Sequence[int] | None = None) -> None:
        self.sizes = tuple(sizes)
        self.owners = tuple(range(len(self.sizes)) if owners is None else owners)
        self.count, self.owner_count = len(self.sizes), max(self.owners, default=-1) + 1
        if min(self.sizes, default=0) < 0 or sum(self.sizes) > 2**56:
            raise ValueError(f"Pieces(sizes): 0 to 2^56, got {self.sizes}")
        if len(self.owners) != self.count or min(self.owners, default=0) < -1:
            raise ValueError(f"Pieces(owners): one per piece, -1 or more, got {self.owners}")
        widths = [sketch_width(size) for size in self.sizes]
        blocks = [-(-width // _LANES) for width in widths]
        slices = [
            -(-size // (_SLICE * max(width, 1)))
            for size, width in zip(self.sizes, widths, strict=True)
        ]
        tasks = [count * block for count, block in zip(slices, blocks, strict=True)]
        columns = [
            list(accumulate(each, initial=0)) for each in (self.sizes, widths, tasks, blocks)
        ]
        self.numel, self.width, self.tasks, self.blocks = (column[-1] for column in columns)
        owned: list[list[int]] = [[] for _ in range(self.owner_count)]
        for piece, owner in enumerate(self.owners):
            if owner >= 0:
                owned[owner].append(piece)
        lines = [(self.count, self.owner_count, 0, 0), *zip(*columns, strict=True)]
        lines += [(before, 0, 0, 0) for before in accumulate(map(len, owned), initial=0)]
        lines += [(piece, 0, 0, 0) for pieces in owned for piece in pieces]
        self.table = torch.tensor(lines, dtype=torch.int64, device="cpu")

    @classmethod
    def from_table(cls, table: Tensor) -> Pieces | None:
        """Returns the pieces of this table, or None if ``Pieces`` makes no such table."""
        if not table.is_cpu or table.dtype != torch.int64 or not table.is_contiguous():
            return None
        if table.dim() != 2 or table.shape[1] != 4 or not len(table):
            return None
        count, owner_count = table[0, :2].tolist()
        first = count + 2  # of the lines of parameters
        if count < 0 or not 0 <= owner_count < len(table) - first:
            return None
        ends, owned = table[first : first + owner_count + 1, 0].tolist(), table[:, 0].tolist()
        owners = [-1] * count
        for owner, (begin, end) in enumerate(pairwise(ends)):
            for piece in owned[first + owner_count + 1 :][begin:end]:
                if 0 <= piece < count:
                    owners[piece] = owner
        try:
            pieces = cls(table[1:first, 0].diff().tolist(), owners)
        except ValueError:
            return None
        return pieces if torch.equal(pieces.table, table) else None


@lru_cache(maxsize=4096)  # every verified step asks for the pieces of each bucket
def pieces_of_sizes(sizes: tuple[int, ...], owners: tuple[int, ...] | None = None) -> Pieces:
    """Returns the pieces of these sizes and owners, the same object every time."""
    return Pieces(sizes, owners)


@once_per_table
def pieces_of(table: Tensor, caller: str) -> Pieces:
    """Returns the pieces of a table; raises ValueError unless ``Pieces`` can make that table.

    Kernels trust the table for every address, and an op may be called with any tensor.
    """
    pieces = Pieces.from_table(table)
    if pieces is None:
        raise ValueError(
            f"{caller}(table): a table as Pieces makes it, on the CPU, "
            f"got {table.dtype} of shape {tuple(table.shape)} on {table.device}"
        )
    return pieces


# ---- gradients


def fingerprint(
    gradient: Tensor,
    mean: Tensor,
    rows: Tensor,
    sketches: Tensor | None,
    pieces: Pieces,
    step: int,
    *,
    residuals: tuple[Tensor | None, Tensor | None] = (None, None),
    keeps: bool = False,
    begin: int = 0,
    factor: float = 1.0,
) -> None:
    """Compares this rank's gradient with the average, in one pass over all of them.

    With ``keeps``, the sketches are of gradient plus old residual minus new residual minus average,
    of gradient minus average, and of the average. Otherwise the residuals count as a part of the
    gradient, and the first sketch is left out. Kernels equal the definition bit for bit: a task
    adds its lines one after the other, and the sums of tasks are added in order.

    Args:
        gradient: float32 or float64, contiguous.
        mean: the average of the gradient's entries from ``begin`` on, contiguous: float32, float16
            or bfloat16; float64 if the gradient is.
        rows: float64, receives ``ROWS`` of each parameter; a hash has the bits of an integer.
        sketches: of the gradient's dtype, two or three rows of ``pieces.width`` numbers, or None.
        pieces: the pieces of the gradient.
        step: number of the step; other steps draw other signs.
        residuals: before the step and after it, of the gradient's dtype.
        keeps: whether the scheme keeps what it has not sent.
        begin: the first entry of the gradient that has an average.
        factor: multiplies the average where it is subtracted and sketched; rounded to
            float32.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    place = (pieces.table, begin, factor, keeps, step % 2**32)
    fingerprint_op(gradient, mean, *residuals, *place, rows, sketches)


@op(
    "fingerprint(Tensor gradient, Tensor mean, Tensor? before, Tensor? after, Tensor table,"
    " int begin, float factor, bool keeps, int step, Tensor(a!) rows, Tensor(b!)? sketches) -> ()",
    takes={
        "table": pieces_of,
        "step": range(2**32),
        "gradient": Entries((torch.float32, torch.float64), n="table.numel"),
        "mean": Entries((*FLOATS, torch.float64)),
        "before": Entries(wide("gradient"), n="gradient"),
        "after": Entries(wide("gradient"), n="gradient"),
        "rows": Entries(
            torch.float64, n=lambda table: len(ROWS) * pieces_of(table, "").owner_count
        ),
        "sketches": Entries(
            wide("gradient"), n=lambda table, keeps: (2 + keeps) * pieces_of(table, "").width
        ),
    },
)
def fingerprint_op(
    gradient: Tensor,
    mean: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    table: Tensor,
    begin: int,
    factor: float,
    keeps: bool,
    step: int,
    rows: Tensor,
    sketches: Tensor | None,
) -> None:
    pieces, flat = pieces_of(table, "fingerprint"), gradient.view(-1)
    places = _Places(pieces, step, flat.device)
    averaged = torch.zeros_like(flat)
    averaged[begin : begin + mean.numel()] = mean.view(-1).to(flat.dtype)
    old, new = (torch.zeros_like(flat) if x is None else x.view(-1) for x in (before, after))
    total, scaled = flat + old - new, averaged * c_float(factor).value  # as kernels take it
    contributed = flat if keeps else total
    # Norms and the hash.
    row = rows.view(len(ROWS), -1)
    contribution, average, difference, *residuals = (
        places.owned(vector.double().square())
        for vector in (contributed, averaged, contributed - scaled, old, new)
    )
    row[0], row[1], row[3] = contribution, average, difference
    row[2] = 2 * (residuals[0] + residuals[1])
    hashes = _hashes_of(averaged, places.within)
    outside = torch.ones_like(flat, dtype=torch.bool)
    outside[begin : begin + mean.numel()] = False
    row[4] = places.counted(hashes.masked_fill(outside, 0)).view(torch.float64)
    # Sketches.
    if sketches is not None:
        vectors = [total - scaled] * keeps + [contributed - scaled, scaled]
        for sketch, vector in zip(sketches.view(len(vectors), -1), vectors, strict=True):
            sketch.copy_(places.sketch(vector))


class _Places:
    """Finds, for each entry, the sums to which it is added."""

    def __init__(self, pieces: Pieces, step: int, device: torch.device) -> None:
        self._pieces = pieces
        lines, count = on_device(pieces.table, device), pieces.count

        def repeated(numbers: Tensor, total: int) -> Tensor:
            """Returns 0 as often as the first number says, 1 as often as the second, and so on."""
            places = torch.arange(len(numbers), device=device)
            return places.repeat_interleave(numbers, output_size=total)

        # For each entry: its sign, and the sum of its task to which it is added.
        first, size = lines[1 : count + 1], lines[1 : count + 2].diff(dim=0)
        piece = repeated(size[:, 0], pieces.numel)
        self.within = torch.arange(pieces.numel, device=device) - first[piece, 0]
        width, blocks = size[piece, 1], size[piece, 3]
        line, key = self.within // width, _mixed((step + 0x632BE5AB) & _WORD)
        turn = _mixed((line + _mixed(~key & _WORD)) & _WORD).where(line > 0, 0)
        column = (self.within % width + turn) & (width.clamp_min(64) - 1)
        words = _mixed((line * blocks + column // _LANES + key) & _WORD)
        self._signs = 1 - 2 * (words >> column % _LANES & 1)
        task = first[piece, 2] + line // _SLICE * blocks + column // _LANES
        self._sums = task * _LANES + column % _LANES
        # For each sum of a task: the lane of its parameter, and its number of a sketch.
        piece = repeated(size[:, 2], pieces.tasks)
        number = torch.arange(pieces.tasks, device=device) - first[piece, 2]
        ends = lines[count + 2 : count + 3 + pieces.owner_count, 0]
        owned = lines[count + 3 + pieces.owner_count :, 0]
        owners = torch.full_like(first[:, 0], pieces.owner_count)
        owners[owned] = repeated(ends.diff(), len(owned))
        self._lanes = owners[piece] * _LANES + number % _LANES
        column = (number % size[piece, 3] * _LANES)[:, None] + torch.arange(_LANES, device=device)
        place = (column + first[piece, 1, None]).where(column < size[piece, 1, None], pieces.width)
        self._numbers = place.view(-1)

    def _tasks(self, values: Tensor) -> Tensor:
        """Returns the 32 sums of each task."""
        sums = values.new_zeros(self._pieces.tasks * _LANES)
        return sums.index_add_(0, self._sums, values).view(-1, _LANES)

    def _of_owners(self, tasks: Tensor) -> Tensor:
        lanes = tasks.new_zeros((self._pieces.owner_count + 1) * _LANES)
        return lanes.index_add_(0, self._lanes, tasks).view(-1, _LANES)[:-1]

    def owned(self, values: Tensor) -> Tensor:
        """Returns the sum of the values of each parameter, in float64."""
        return summed(self._of_owners(summed(self._tasks(values))))

    def counted(self, values: Tensor) -> Tensor:
        """Returns the sum of the integers of each parameter."""
        return self._of_owners(self._tasks(values).sum(1)).sum(1)

    def sketch(self, vector: Tensor) -> Tensor:
        """Returns the sketches of all pieces."""
        tasks = self._tasks(vector * self._signs).view(-1)
        return vector.new_zeros(self._pieces.width + 1).index_add_(0, self._numbers, tasks)[:-1]


@fingerprint_op.check
def _check(gradient: Tensor, mean: Tensor, table: Tensor, begin: int) -> None:
    if (gradient.dtype == torch.float64) != (mean.dtype == torch.float64):
        raise TypeError(
            f"fingerprint(mean): float64 if the gradient is, got {mean.dtype} and {gradient.dtype}"
        )
    numel = pieces_of(table, "fingerprint").numel
    if not 0 <= begin <= numel - mean.numel():
        raise ValueError(
            f"fingerprint(begin): {mean.numel()} entries of the mean are within {numel} from there "
            f"on, got {begin}"
        )


# ---- parameters


def hash_parts(x: Tensor, out: Tensor, sizes: tuple[int, ...], *, zero: int = 0) -> None:
    """Adds the hash of each part of ``x`` to ``out``; every bit and its place count.

    Args:
        x: uint8, int16, int32 or int64, contiguous: the bits of entries.
        out: int64, an entry per part.
        sizes: entries of each part.
        zero: bits that are hashed as 0 is; those of -0, since the two are equal.
    """
    hash_parts_op(x, parts_of_sizes(sizes).table, zero, out)


@op(
    "hash_parts(Tensor x, Tensor table, int zero, Tensor(a!) out) -> ()",
    takes={
        "table": parts_of,
        "x": Entries((torch.uint8, torch.int16, torch.int32, torch.int64), n="table.numel"),
        "out": Entries(torch.int64, n="table.count"),
    },
)
def hash_parts_op(x: Tensor, table: Tensor, zero: int, out: Tensor) -> None:
    flat, words = x.view(-1), x.element_size() // 4 or 1
    flat = flat.masked_fill(flat == zero, 0).view(torch.int32 if words == 2 else x.dtype).long()
    bits = flat & (_WORD if x.element_size() >= 4 else (1 << 8 * x.element_size()) - 1)
    sizes = parts_of(table, "hash_parts").sizes
    for index, part in enumerate(bits.split([size * words for size in sizes])):
        places = torch.arange(len(part), device=x.device)
        out.view(-1)[index] += _hash(part, places).sum()


def _hashes_of(values: Tensor, places: Tensor) -> Tensor:
    """Returns the hash of each number of 32 or 64 bits at its place, as int64."""
    wide = values.dtype == torch.float64
    bits = values.masked_fill(values == 0, 0.0).view(torch.int64 if wide else torch.int32).long()
    bits = bits.masked_fill(values.isnan(), 0x7FF8 << 48 if wide else 0x7FC00000)
    if not wide:
        return _hash(bits, places)
    return _hash(bits, 2 * places) + _hash(bits >> 32, 2 * places + 1)


def _hash(bits: Tensor, places: Tensor) -> Tensor:
    return _mixed((bits + places * 0x9E3779B9) & _WORD)


def _mixed(x: Number) -> Number:
    """Mixes 32 bits of an integer, or of integers of 64 bits.

    Reference: Wellons, Prospecting for Hash Functions, 2018 (lowbias32).
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    return x ^ x >> 16


# Kernels --------------------------------------------------------------------------------------


_DTYPES = {**cpu.DTYPES, torch.float64: 3}
_NAMES = {**cuda.DTYPES, torch.float64: "double"}


@fingerprint_op.kernel("cpu")
def _fingerprint_cpu(
    gradient: Tensor,
    mean: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    table: Tensor,
    begin: int,
    factor: float,
    keeps: bool,
    step: int,
    rows: Tensor,
    sketches: Tensor | None,
) -> None:
    tasks = pieces_of(table, "").tasks
    squares = torch.empty(_SQUARES * tasks, dtype=torch.float64, device="cpu")
    hashes = torch.empty(tasks, dtype=torch.int64, device="cpu")
    place = (begin, begin + mean.numel(), factor, before, after, keeps, step)
    settings = (_DTYPES[mean.dtype], gradient, mean, *place, table)
    cpu.call("fingerprint", *settings, tasks, squares, hashes, rows, sketches)


@fingerprint_op.kernel("cuda")
def _fingerprint_cuda(
    gradient: Tensor,
    mean: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    table: Tensor,
    begin: int,
    factor: float,
    keeps: bool,
    step: int,
    rows: Tensor,
    sketches: Tensor | None,
) -> None:
    pieces, device = pieces_of(table, ""), gradient.device
    lines, tasks, count = on_device(table, device), pieces.tasks, 2 + keeps
    squares = torch.empty(_SQUARES * tasks, dtype=torch.float64, device=device)
    hashes = torch.empty(tasks, dtype=torch.int64, device=device)
    sums = None
    if sketches is not None:
        sums = torch.empty(count * tasks * _LANES, dtype=gradient.dtype, device=device)
    place = (begin, begin + mean.numel(), factor, before, after, keeps, step)
    results = (lines, tasks, squares, hashes, sums)
    wide = _NAMES[gradient.dtype]
    kernel = f"fingerprint<{wide}, {_NAMES[mean.dtype]}>"
    cuda.launch("fingerprint.cu", kernel, device, tasks, (gradient, mean, *place, *results))
    count = 0 if sketches is None else count
    work = len(ROWS) * pieces.owner_count + count * pieces.blocks
    arguments = (*results, count, rows, sketches)
    cuda.launch("fingerprint.cu", f"fingerprint_sums<{wide}>", device, work, arguments)


@hash_parts_op.kernel("cpu")
def _hash_cpu(x: Tensor, table: Tensor, zero: int, out: Tensor) -> None:
    cpu.call("hash_parts", x.element_size(), x, table, table.shape[0] - 1, zero, out)


_WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


@hash_parts_op.kernel("cuda")
def _hash_cuda(x: Tensor, table: Tensor, zero: int, out: Tensor) -> None:
    kernel, chunks = f"hash_parts<{_WORDS[x.element_size()]}>", parts_of(table, "").chunks
    arguments = (x, on_device(table, x.device), table.shape[0] - 1, zero, out)
    cuda.launch("fingerprint.cu", kernel, x.device, chunks, arguments)
