"""Cosine coefficients: all implementations agree, and they are those of the transform."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.kernels import Tiles, dct, decode_cosines, encode_cosines
from tests.kernels.inputs import CPP, DTYPES, plain, tricky, unaligned
from tests.kernels.machines import assert_agree

NAMES = ("encode_cosines", "decode_cosines")
KERNELS = {"dct.cu": [f"{name}<{t}>" for name in NAMES for t in CPP.values()]}
# Whole and cut squares; lines of many pieces, between matrices and alone; nothing.
SHAPES = (
    [(1, 30), (64, 64), (1, 1), (63, 100), (130, 70), (1, 5000), (0, 3)],
    [(64, 129)],
    [(1, 64)] * 3,
    [],
)


def bits(payload: Tensor) -> list[Tensor]:
    """The places, and the values as numbers: NaN may have any bits."""
    return [payload[..., 0, :, :].clone(), payload[..., 1, :, :].clone().view(torch.bfloat16)]


def outputs(run: Any, x: Tensor, old: Tensor, tiles: Tiles, k: int) -> list[Tensor]:
    results, payloads = [], torch.full((3, 2, tiles.count, k), 7, dtype=torch.int16)
    for scale, payload in zip((0.9, 0.0, -2.0), payloads, strict=True):
        new = torch.full((len(x),), 7.0)
        run(dct.encode_cosines_op, x, old, scale, tiles.table, k, new, payload)
        results += [new, *bits(payload)]
    for sign in (False, True):
        out = torch.full_like(x, 7.0)
        run(dct.decode_cosines_op, payloads, tiles.table, sign, out)
        results.append(out)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_the_definition(dtype):
    for shapes in SHAPES:
        tiles = Tiles(shapes)
        for k, make in ((32, plain), (1, unaligned), (4096, tricky), (100, tricky)):
            x, old = make(tiles.numel, dtype), make(tiles.numel, seed=1)
            assert_agree(KERNELS, outputs, x, old, tiles, k)


def test_of_equal_magnitudes_the_lower_place_is_taken():
    # One entry of a line of zeros: a cosine has coefficients of several sizes, its signs in pairs.
    tiles = Tiles([(1, 4096)])
    for x in (torch.zeros(4096), torch.ones(4096), torch.full((4096,), float("nan"))):
        assert_agree(KERNELS, outputs, x, torch.zeros(4096), tiles, 7)


def test_all_coefficients_give_the_momentum_back():
    tiles = Tiles([(100, 130), (1, 70)])
    x, old = plain(tiles.numel), plain(tiles.numel, seed=1)
    new, out = torch.empty(2, tiles.numel)
    payload = torch.empty(2, tiles.count, 4096, dtype=torch.int16)
    encode_cosines(x, old, 0.5, tiles, 4096, new, payload)
    decode_cosines(payload[None], tiles, out)
    # Values are rounded to bfloat16.
    torch.testing.assert_close(out + new, x + 0.5 * old, atol=1e-4, rtol=1e-5)
    assert new.norm() < 2**-8 * (x + 0.5 * old).norm()


def test_they_are_those_of_the_cosine_transform():
    # By the Fourier transform of the entries and their mirror image.
    x = plain(5 * 64).view(5, 64)
    rows = x.double()
    spectrum = torch.fft.fft(torch.cat([rows, rows.flip(1)], 1))[:, :64]
    turned = torch.exp(-1j * torch.pi * torch.arange(64) / 128) * spectrum
    expected = turned.real / 2 * (2 / 64) ** 0.5
    expected[:, 0] /= 2**0.5
    actual = dct._transformed(torch.nn.functional.pad(x, (0, 0, 0, 59))[None], 0)[0, :5]
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": 0}, r"encode_cosines\(k\): 1 to 4096"),
        ({"x": torch.ones(5)}, r"encode_cosines\(x\): 4096 entries"),
        ({"payload": torch.zeros(3, dtype=torch.int16)}, r"encode_cosines\(payload\): 4 entries"),
    ],
)
def test_wrong_arguments_are_named(changes: Any, words: str) -> None:
    arguments = {
        "x": torch.ones(4096),
        "momentum": torch.ones(4096),
        "decay": 0.5,
        "tiles": Tiles([(64, 64)]),
        "k": 2,
        "new": torch.ones(4096),
        "payload": torch.zeros(2, 1, 2, dtype=torch.int16),
    }
    with pytest.raises(ValueError, match=words):
        encode_cosines(**(arguments | changes))


def test_payloads_of_other_tiles_are_refused():
    tiles, payloads = Tiles([(64, 64)]), torch.zeros(1, 2, 2, 9, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"\(payloads\): shape \(payloads, 2, 1, k\)"):
        decode_cosines(payloads, tiles, torch.ones(4096))
    with pytest.raises(ValueError, match=r"Tiles\(shapes\)"):
        Tiles([(-1, 3)])


def fuzz(run: Any, rng: random.Random) -> None:
    sides = [1, rng.randrange(100), rng.randrange(64, 150)]
    tiles = Tiles([(rng.choice(sides), rng.choice(sides)) for _ in range(rng.randrange(5))])
    x = torch.randn(tiles.numel).to(rng.choice(DTYPES))
    old, k = torch.randn(tiles.numel), rng.choice([1, rng.randrange(1, 100), 4096])
    outputs(run, x, old, tiles, k)
    # Damaged places stay within their tile. Those of a payload differ, as threads would race.
    places = torch.rand(2, tiles.count, 4096).argsort()[..., :k]
    damaged = torch.randint(-(2**15), 2**15, (2, 2, tiles.count, k)).short()
    damaged[:, 0] = damaged[:, 0] & ~4095 | places.short()
    run(dct.decode_cosines_op, damaged, tiles.table, True, x)
