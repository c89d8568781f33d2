"""Computes sketches of vectors: some numbers that are linear in a vector and show its norm.

The mean of the ranks' sketches is the sketch of their mean. So the norm of a mean is known, up to
some percent, from a message that is a small fraction of the vectors.

Source: the tug-of-war sketch of Alon, Matias and Szegedy (1996); in disjoint parts, as by Charikar,
Chen and Farach-Colton (2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["dots_of", "sketches_of", "width_of"]

# Numbers of a sketch. Primes, so that lines of any other length end at all of them in turn.
_WIDTHS = (1021, 509, 251, 127, 61)
_ENTRIES = 64  # per number, at least, in all but the narrowest
_CHUNK = 2**17  # entries that are added up at a time: they stay in a CPU's cache


def width_of(size: int) -> int:
    """Returns the length of the sketch of a vector of ``size`` entries.

    The standard deviation of the norm is 1 / sqrt(2 * width) of it: 9 % where it is 61, and 2 %
    where it is 1021. The norm is exact where all entries have a number of their own.
    """
    return next((width for width in _WIDTHS if size >= _ENTRIES * width), min(size, _WIDTHS[-1]))


def sketches_of(flats: Sequence[Tensor], sizes: Sequence[int], step: int) -> Tensor:
    """Returns a row of successive sketches for each flat tensor, in the tensor's dtype.

    Entries are added up with random signs, the same on all ranks.

    Args:
        flats: at least one; each holds vectors of these sizes.
        sizes: numbers of entries.
        step: number of the step; other steps draw other signs.
    """
    total, groups = _places(tuple(sizes), flats[0].device)
    sketches = flats[0].new_empty((len(flats), total))
    vectors = [flat.split(list(sizes)) for flat in flats]
    # Vectors of one size together: models of many small layers have few sizes.
    for size, owners, places in groups:
        chosen = [each[owner] for each in vectors for owner in owners]
        into = torch.cat([places + number * total for number in range(len(flats))])
        together = max(1, _CHUNK // max(size, 1))
        for begin in range(0, len(chosen), together):
            some = chosen[begin : begin + together]
            rows = torch.stack(some) if len(some) > 1 else some[0].view(1, -1)
            sketches.view(-1)[into[begin : begin + together]] = _sketches_of_rows(rows, step)
    return sketches


@lru_cache(maxsize=256)
def _places(
    sizes: tuple[int, ...], device: torch.device
) -> tuple[int, list[tuple[int, list[int], Tensor]]]:
    """Returns the total length of the sketches of vectors, and the positions by vector size."""
    of_size: dict[int, list[int]] = {}
    for owner, size in enumerate(sizes):
        of_size.setdefault(size, []).append(owner)
    begins = [0, *accumulate(width_of(size) for size in sizes)]
    groups = []
    for size, owners in of_size.items():
        first = torch.tensor([begins[owner] for owner in owners], device="cpu")
        places = first.unsqueeze(1) + torch.arange(width_of(size), device="cpu")
        groups.append((size, owners, places.to(device)))
    return begins[-1], groups


def dots_of(sketches: Tensor, others: Tensor, sizes: Sequence[int]) -> Tensor:
    """Returns the scalar products of vectors by their sketches, in float64.

    Args:
        sketches, others: results of ``sketches_of``, or sums of them.
        sizes: numbers of entries of the vectors.
    """
    products = sketches.double() * others.double()
    # Not differences of one running sum, in which small products behind large ones are lost.
    widths = torch.tensor([width_of(size) for size in sizes], device=sketches.device)
    owners = torch.arange(len(sizes), device=sketches.device).repeat_interleave(widths)
    return products.new_zeros(len(sizes)).index_add_(0, owners, products)


def _sketches_of_rows(rows: Tensor, step: int) -> Tensor:
    """Returns the sketch of each row of a matrix."""
    many, width = len(rows), width_of(rows.shape[1])
    sketches = rows.new_zeros((many, width))
    if not width:
        return sketches
    # In lines of a few more places than numbers, entries of one column of a matrix do not fall
    # into one number, whatever its width: not in every step.
    line = width + 1 + _mixed(step) % max(1, width // 8)
    spread = rows.new_zeros(0)
    for number, part in enumerate(rows.split(_CHUNK // width * width, 1)):
        lines, rest = divmod(part.shape[1], width)
        used = (lines + 1) * line
        if spread.numel() != many * -(-used // width) * width:
            spread = rows.new_zeros((many, -(-used // width) * width))
        signs = _signs_of(part, step, number)
        into, whole = spread[:, :used].view(many, lines + 1, line), lines * width
        torch.mul(
            part[:, :whole].view(many, lines, width),
            signs[:whole].view(lines, width),
            out=into[:, :lines, :width],
        )
        into[:, lines, :rest] = part[:, whole:] * signs[whole:]
        sketches += spread.view(many, -1, width).sum(1)
    return sketches


def _mixed(step: int) -> int:
    """Hashes the step number (Knuth's multiplicative hash)."""
    return step * 2654435761 % 2**32 >> 16


def _signs_of(part: Tensor, step: int, number: int) -> Tensor:
    """Returns signs for a part of each row: products of two tables, at different offsets.

    Shifted by multiples of a width, a single table would meet itself in the same numbers.
    """
    first_table, second_table = _tables(part.device, part.dtype)
    first, second = (40503 * step + 30011 * number) % _CHUNK, (9973 * step + 7919 * number) % _CHUNK
    size = part.shape[1]
    return first_table[first : first + size] * second_table[second : second + size]


@lru_cache(maxsize=8)
def _tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns two tables of random signs, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (2, 2 * _CHUNK), generator=generator, device="cpu")
    # A copy from the host is over when it returns: any stream of a GPU may read what is kept.
    first, second = signs.mul_(2).sub_(1).to(dtype).to(device)
    return first, second
