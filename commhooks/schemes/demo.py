"""Defines DeMo, which sends the largest cosine coefficients of each rank's own momentum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.core._bucket import Bucket, Result, SchemeExchange
from commhooks.core._layout import Layout
from commhooks.core._registry import register_scheme
from commhooks.core._scheme import Scheme
from commhooks.core._slot import Slot
from commhooks.core._traits import INT32_PLACES, Traits
from commhooks.kernels import dct, scatter_sum
from ddp_core import AllGather

__all__ = ["DeMo"]

_MOMENTUM = Slot("demo.momentum", resize="mean", dtype=torch.float32)
_SIDE = 64  # entries per transform, and side of a tile
_TILE = _SIDE * _SIDE


@register_scheme("demo")
@dataclass(frozen=True)
class DeMo(Scheme):
    """Sends the largest cosine coefficients of each rank's momentum, and keeps all others.

    ``m = decay m + g``. The ``k`` largest coefficients of each tile of 64 x 64 entries are sent
    (4 bytes each) and subtracted from m. A coefficient that several ranks sent arrives as the mean
    over these ranks; the result is transformed back, and its sign taken. Matrices of 64 x 64 and
    above are transformed in both directions (edges padded with zeros). All other parameters of a
    bucket (vectors, thin matrices) are joined, transformed in runs of 64 entries, and the ``k``
    largest coefficients of each 4096 are sent; the reference code transforms and chooses within
    each parameter. The momenta of the ranks differ on purpose; use an optimizer without momentum,
    and a learning rate for signs.

    Args:
        k: number of coefficients per tile, 1 to 4096.
        decay: decay of the momentum, 0 <= decay < 1.
        sign: returns the sign of the mean; False: the mean itself.

    Example:
        >>> hook = register(ddp_model, "demo", k=32)

    Reference: Peng, Quesnelle and Kingma, DeMo: Decoupled Momentum Optimization, 2024.
    """

    k: int = 32
    decay: float = 0.999
    sign: bool = True

    # Tiles of small matrices are padded, so that their places are more than entries.
    traits = Traits(returns="update", max_bucket_numel=INT32_PLACES // 2)
    keeps = (_MOMENTUM,)

    def __post_init__(self) -> None:
        if not 1 <= self.k <= _TILE:
            raise ValueError(f"DeMo(k=...) is a number of coefficients, 1 to 4096, got {self.k!r}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"DeMo(decay=...): 0 <= decay < 1, got {self.decay!r}")

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        layout, k = bucket.layout, self.k
        old = bucket.read(_MOMENTUM)
        momentum = bucket.gradient.to(torch.float32) + self.decay * old
        tiles = _tiles_of(layout)
        rows = tiles.transformed(momentum)
        # In ascending order, so that one pass adds up the payloads of all ranks.
        largest = rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, largest).bfloat16()
        payload = torch.stack([largest.to(torch.int16), values.view(torch.int16)])
        gathered = yield AllGather(payload)

        # The rounded values leave the momentum, so that rounding errors are sent later.
        sent = torch.zeros_like(rows).scatter_(1, largest, values.float())
        bucket.write(_MOMENTUM, momentum - tiles.back(sent))
        starts = torch.arange(len(rows), device=rows.device, dtype=torch.int32)[:, None] * _TILE
        indices = (gathered[:, 0].to(torch.int32) + starts).flatten(1)
        arrived = gathered[:, 1].view(torch.bfloat16).float().flatten(1)
        total, count = rows.new_empty(2, rows.numel())
        # Rank after rank, on every device: the same bits on every rank.
        scatter_sum(indices, arrived, total)
        scatter_sum(indices, torch.ones_like(arrived), count)
        mean = tiles.back((total / count.clamp(min=1.0)).view_as(rows))
        if self.sign:
            mean = torch.where(mean.isfinite(), mean.sign(), torch.nan)  # the sign of NaN is 0
        return Result(bucket.output.copy_(mean))


class _Tiles:
    """Cuts a bucket into tiles: matrices into 64 x 64, all other parameters joined, by 4096."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sides = [_matrix(shape) for shape in layout.shapes]
        joined = sum(n for n, sides in zip(layout.sizes, self._sides, strict=True) if not sides)
        self._line_tiles = -(-joined // _TILE)
        self._line_padding = self._line_tiles * _TILE - joined

    def transformed(self, flat: Tensor) -> Tensor:
        """Returns the coefficients of a flat tensor, a row per tile: matrices first."""
        grids, vectors = [], []
        parts = flat.split(self._layout.sizes)
        for part, sides in zip(parts, self._sides, strict=True):
            if sides is None:
                vectors.append(part)
                continue
            high, wide = sides
            padded = pad(part.view(high, wide), (0, -wide % _SIDE, 0, -high % _SIDE))
            grid = padded.view(-(-high // _SIDE), _SIDE, -(-wide // _SIDE), _SIDE)
            grids.append(grid.transpose(1, 2).reshape(-1, _SIDE, _SIDE))
        line = pad(torch.cat([flat[:0], *vectors]), (0, self._line_padding))
        line = line.contiguous()
        dct(line, line)
        square = torch.cat([flat[:0].view(0, _SIDE, _SIDE), *grids])
        for _ in range(2):  # rows, then columns, which the transposition makes rows
            dct(square, square)
            square = square.transpose(1, 2).contiguous()
        return torch.cat([square.view(-1, _TILE), line.view(-1, _TILE)])

    def back(self, rows: Tensor) -> Tensor:
        """Returns the flat tensor of these coefficients."""
        squares = len(rows) - self._line_tiles
        square = rows[:squares].reshape(-1, _SIDE, _SIDE)
        for _ in range(2):
            square = square.transpose(1, 2).contiguous()
            dct(square, square, inverse=True)
        line = rows[squares:].reshape(-1).contiguous()
        dct(line, line, inverse=True)
        pieces, line_begin, begin = [], 0, 0
        for n, sides in zip(self._layout.sizes, self._sides, strict=True):
            if sides is None:
                pieces.append(line[line_begin : line_begin + n])
                line_begin += n
                continue
            high, wide = sides
            down, across = -(-high // _SIDE), -(-wide // _SIDE)
            grid = square[begin : begin + down * across].view(down, across, _SIDE, _SIDE)
            begin += down * across
            padded = grid.transpose(1, 2).reshape(down * _SIDE, across * _SIDE)
            pieces.append(padded[:high, :wide].reshape(-1))
        return torch.cat([rows.new_empty(0), *pieces])


@lru_cache(maxsize=1024)
def _tiles_of(layout: Layout) -> _Tiles:
    return _Tiles(layout)


def _matrix(shape: torch.Size) -> tuple[int, int] | None:
    """Returns height and width of a parameter that is cut into squares; None for all others."""
    if len(shape) < 2 or not shape.numel():
        return None
    high, wide = shape[0], shape.numel() // shape[0]
    return (high, wide) if min(high, wide) >= _SIDE else None
