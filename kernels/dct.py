"""Sends the largest cosine coefficients of momenta, by tiles of 64 x 64 entries."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ._tables import on_device
from ._tiles import SIDE, TILE, Tiles, tiles_of
from .runtime import cpu, cuda
from .runtime.op import FLOATS, Entries, op

__all__ = ["Tiles", "decode_cosines", "encode_cosines"]

_INFINITY, _NAN = 0x7F800000, 0x7FC00000  # bits
_THREADS = 64  # of a CUDA block, which works on one tile


def encode_cosines(
    x: Tensor, momentum: Tensor, decay: float, tiles: Tiles, k: int, new: Tensor, payload: Tensor
) -> None:
    """Writes the ``k`` largest cosine coefficients of each tile of ``decay * momentum + x``.

    The orthonormal DCT-II transforms the columns of a square and then its rows, and of a part of
    the line its rows alone. NaN counts as largest, and among equal magnitudes the lower place
    wins. ``new`` receives the sum without what was sent. Kernels equal the definition bit for bit:
    they take the same steps of a fast transform, of 12 operations per entry and direction.

    Args:
        x: float32, float16 or bfloat16, contiguous, ``tiles.numel`` entries.
        momentum: float32, as many entries.
        decay: multiplies ``momentum``.
        tiles: where the tiles lie in the bucket.
        k: coefficients of a tile, 1 to 4096.
        new: float32, as many entries as ``x``; the next momentum.
        payload: int16, shape (2, tiles, k): places within the tile, ascending, and the bits of
            bfloat16 values.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.

    References: Ahmed, Natarajan and Rao, Discrete cosine transform, 1974, as used by Peng et al.,
        DeMo, 2024; Plonka and Tasche, Fast and numerically stable algorithms for discrete cosine
        transforms, 2005.
    """
    encode_cosines_op(x, momentum, decay, tiles.table, k, new, payload)


def decode_cosines(payloads: Tensor, tiles: Tiles, out: Tensor, *, sign: bool = False) -> None:
    """Writes the inverse transform of the mean of each coefficient over the payloads that have it.

    Args:
        payloads: int16, shape (payloads, 2, tiles, k), of :func:`encode_cosines`.
        tiles: where the tiles lie in the bucket.
        out: float32, float16 or bfloat16, contiguous, ``tiles.numel`` entries.
        sign: writes the sign of each entry instead; NaN where it is not finite.

    Raises:
        TypeError, ValueError: a tensor has the wrong dtype, size or device; the message names it.
    """
    decode_cosines_op(payloads, tiles.table, sign, out)


@op(
    "encode_cosines(Tensor x, Tensor momentum, float decay, Tensor table, int k, Tensor(a!) new,"
    " Tensor(b!) payload) -> ()",
    takes={
        "table": tiles_of,
        "x": Entries(FLOATS, n="table.numel"),
        "momentum": Entries(torch.float32, n="x"),
        "k": range(1, TILE + 1),
        "new": Entries(torch.float32, n="x"),
        "payload": Entries(torch.int16),
    },
)
def encode_cosines_op(
    x: Tensor, momentum: Tensor, decay: float, table: Tensor, k: int, new: Tensor, payload: Tensor
) -> None:
    tiles = tiles_of(table, "encode_cosines")
    total = x.flatten().float() + momentum.flatten() * decay
    rows = _transformed(tiles.cut(total), tiles.squares).view(-1, TILE)
    # As integers, NaN is largest; all kinds of it are equal.
    magnitude = rows.view(torch.int32) & 0x7FFFFFFF
    magnitude = torch.where(magnitude > _INFINITY, _NAN, magnitude)
    order = magnitude.sort(dim=1, descending=True, stable=True).indices
    largest = order[:, :k].sort(dim=1).values
    values = rows.gather(1, largest).bfloat16()
    payload.view(2, -1, k).copy_(torch.stack([largest.short(), values.view(torch.int16)]))
    # The rounded values leave the momentum, so that rounding errors are sent later.
    sent = torch.zeros_like(rows).scatter_(1, largest, values.float()).view(-1, SIDE, SIDE)
    new.view(-1).copy_(total - tiles.joined(_transformed_back(sent, tiles.squares)))


@op(
    "decode_cosines(Tensor payloads, Tensor table, bool sign, Tensor(a!) out) -> ()",
    takes={
        "table": tiles_of,
        "payloads": Entries(torch.int16),
        "out": Entries(FLOATS, n="table.numel"),
    },
)
def decode_cosines_op(payloads: Tensor, table: Tensor, sign: bool, out: Tensor) -> None:
    tiles = tiles_of(table, "decode_cosines")
    total = torch.zeros(tiles.count, TILE, dtype=torch.float32, device=out.device)
    count = torch.zeros_like(total)
    for payload in payloads:  # in their order: the same bits on every rank
        places = payload[0].long() & (TILE - 1)  # damaged ones stay within the tile
        values = payload[1].view(torch.bfloat16).float()
        total.scatter_(1, places, total.gather(1, places) + values)
        count.scatter_(1, places, count.gather(1, places) + 1.0)
    means = (total / count.clamp(min=1.0)).view(-1, SIDE, SIDE)
    mean = tiles.joined(_transformed_back(means, tiles.squares))
    if sign:
        mean = torch.where(mean.isfinite(), mean.sign(), torch.nan)  # the sign of NaN is 0
    out.view(-1).copy_(mean)


def _transformed(tiles: Tensor, squares: int) -> Tensor:
    """Returns the coefficients of tiles, of which the first ``squares`` have columns."""
    columns = _rows(tiles[:squares].transpose(1, 2), _dct_ii).transpose(1, 2)
    return _rows(torch.cat([columns, tiles[squares:]]), _dct_ii)


def _transformed_back(coefficients: Tensor, squares: int) -> Tensor:
    """Returns the tiles of coefficients: the transpose of ``_transformed``."""
    tiles = _rows(coefficients, _dct_iii)
    columns = _rows(tiles[:squares].transpose(1, 2), _dct_iii).transpose(1, 2)
    return torch.cat([columns, tiles[squares:]])


def _rows(tiles: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
    # A matrix product would sum in an order that depends on the library and on the processor.
    # Entries are multiplied by 1 / sqrt(64) first, so that no sum overflows where results do not.
    return transform(tiles.reshape(-1, SIDE) * 0.125).view(tiles.shape)


def _dct_ii(x: Tensor) -> Tensor:
    """Returns the DCT-II of each row, times the root of its length."""
    half = x.shape[1] // 2
    if not half:
        return x
    # A cosine of even index is the same for an entry and its mirror image; a cosine of odd index
    # has the other sign.
    low, high = x[:, :half], x.flip(1)[:, :half]
    return torch.stack([_dct_ii(low + high), _dct_iv(low - high)], 2).flatten(1)


def _dct_iii(y: Tensor) -> Tensor:
    """Returns the DCT-III of each row, times the root of its length.

    It is the transpose of ``_dct_ii``: the same steps in reverse. A DCT-IV is its own transpose.
    """
    if y.shape[1] == 1:
        return y
    sums, differences = _dct_iii(y[:, ::2]), _dct_iv(y[:, 1::2])
    return torch.cat([sums + differences, (sums - differences).flip(1)], 1)


def _dct_iv(x: Tensor) -> Tensor:
    """Returns the DCT-IV of each row, times the root of its length.

    With an angle t of entry and frequency m, results 2m - 1 and 2m have the cosines of (4m - 1) t
    and (4m + 1) t, which are cos(4mt) cos(t) plus and minus sin(4mt) sin(t): two transforms of half
    the length, of rotated pairs. The sines of 4mt are cosines of another frequency, with signs.
    """
    half = x.shape[1] // 2
    if not half:
        return x
    low, high = x[:, :half], x.flip(1)[:, :half]
    cosines, sines, signs = _rotation(half, x.device)
    a = _dct_ii(low * cosines + high * sines)
    b = _dct_ii(high * (cosines * signs) - low * (sines * signs)).flip(1)
    inner = torch.stack([a[:, 1:] - b[:, :-1], a[:, 1:] + b[:, :-1]], 2).flatten(1)
    root = 2.0 * _cosine(32)  # of 2
    return torch.cat([a[:, :1] * root, inner, b[:, -1:] * -root], 1)


@cache
def _rotation(half: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    angles = [(2 * j + 1) * (16 // half) for j in range(half)]
    rows = [
        map(_cosine, angles),
        [_cosine(64 - angle) for angle in angles],
        [(-1) ** j for j in range(half)],
    ]
    cosines, sines, signs = (
        torch.tensor(list(r), dtype=torch.float32, device=device) for r in rows
    )
    return cosines, sines, signs


def _cosine(k: int) -> float:
    """Returns cos(k pi / 128); ``kTable`` in dct.h has the same numbers, rounded to float32."""
    return math.cos(k * math.pi / 128)


@encode_cosines_op.check
def _check_encode(table: Tensor, k: int, payload: Tensor) -> None:
    expected = 2 * tiles_of(table, "encode_cosines").count * k
    if payload.numel() != expected:
        raise ValueError(f"encode_cosines(payload): {expected} entries, got {payload.numel()}")


@decode_cosines_op.check
def _check_decode(payloads: Tensor, table: Tensor) -> None:
    count, shape = tiles_of(table, "decode_cosines").count, tuple(payloads.shape)
    if len(shape) != 4 or shape[1:3] != (2, count) or not 1 <= shape[3] <= TILE:
        raise ValueError(
            f"decode_cosines(payloads): shape (payloads, 2, {count}, k), k up to 4096, got {shape}"
        )
    if shape[0] >= 2**16:  # a tile counts in 16 bits
        raise ValueError(f"decode_cosines(payloads): fewer than 65536, got {shape[0]}")


@encode_cosines_op.kernel("cpu")
def _encode_cpu(
    x: Tensor, momentum: Tensor, decay: float, table: Tensor, k: int, new: Tensor, payload: Tensor
) -> None:
    cpu.call("encode_cosines", cpu.DTYPES[x.dtype], x, momentum, decay, table, k, new, payload)


@decode_cosines_op.kernel("cpu")
def _decode_cpu(payloads: Tensor, table: Tensor, sign: bool, out: Tensor) -> None:
    source = (payloads, payloads.shape[0], payloads.shape[3])
    cpu.call("decode_cosines", cpu.DTYPES[out.dtype], *source, table, sign, out)


@encode_cosines_op.kernel("cuda")
def _encode_cuda(
    x: Tensor, momentum: Tensor, decay: float, table: Tensor, k: int, new: Tensor, payload: Tensor
) -> None:
    arguments = (x, momentum, decay, on_device(table, x.device), k, new, payload)
    _launch("encode_cosines", x, table, arguments)


@decode_cosines_op.kernel("cuda")
def _decode_cuda(payloads: Tensor, table: Tensor, sign: bool, out: Tensor) -> None:
    source = (payloads, payloads.shape[0], payloads.shape[3])
    _launch("decode_cosines", out, table, (*source, on_device(table, out.device), sign, out))


def _launch(
    kernel: str, bucket: Tensor, table: Tensor, arguments: tuple[Tensor | float, ...]
) -> None:
    warps = tiles_of(table, kernel).count * _THREADS // 32
    name = f"{kernel}<{cuda.DTYPES[bucket.dtype]}>"
    cuda.launch("dct.cu", name, bucket.device, warps, arguments, threads=_THREADS)
