"""Numbers that Python and the sources of kernels both know are the same ones."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from commhooks.kernels import _matrices, orthonormal, philox, scatter, sparse
from commhooks.kernels.dct import _cosine
from commhooks.kernels.fingerprint import _SLICE, _SQUARES, _WIDTHS

SOURCES = Path(_matrices.__file__).parent
# Where it is in a source, its name there, and its value in Python.
SHARED = [
    ("include/low_rank.h", "kSegment", _matrices._SEGMENT),
    ("include/low_rank.h", "kChunk", _matrices._CHUNK),
    ("include/low_rank.h", "kSums", orthonormal._SUMS),
    ("include/low_rank.h", "kRowGroup", orthonormal._GROUP),
    ("include/low_rank.h", "kVanished", orthonormal._VANISHED),
    ("include/low_rank.h", "kDead", orthonormal._DEAD),
    ("include/fingerprint.h", "kSlice", _SLICE),
    ("include/fingerprint.h", "kWidest", _WIDTHS[0]),
    ("include/fingerprint.h", "kSquares", _SQUARES),
    ("low_rank.cu", "kRows", _matrices._ROWS),
    ("low_rank.cu", "kTile", _matrices._TILE),
    ("include/philox.h", "kRounds", philox._ROUNDS),
    ("include/philox.h", "kSigns", philox.SIGNS),
    ("sparse.cpp", "kFew", sparse._SAMPLE),
    ("sparse.cu", "kTile", sparse._TILE),
    ("sparse.cu", "kTake", sparse._TAKE),
    ("scatter.cu", "kRange", scatter._RANGE),
    ("include/tickets.h", "kWarps", sparse._WARPS),
    ("scatter.cu", "kThreads", 32 * scatter._WARPS),
]


def constants(file: str) -> dict[str, float]:
    """By name, the numbers that a source declares as constexpr; of equal names the first."""
    text = (SOURCES / file).read_text()
    numbers: dict[str, float] = {}
    for declared in re.findall(r"constexpr (?:int|i64|double) (k\w+ = [^;]*);", text):
        for name, value in re.findall(r"(k\w+) = ([^,]*)", declared):
            plain = value.replace("ull", "")
            if re.fullmatch(r"[\d.()</ ]+", plain):  # others are made of types or of constants
                numbers.setdefault(name, eval(plain))
    return numbers


@pytest.mark.parametrize(("file", "name", "value"), SHARED)
def test_a_number_is_that_of_the_source(file: str, name: str, value: float) -> None:
    assert constants(file)[name] == value


def test_the_cosines_are_the_nearest_to_the_true_ones() -> None:
    text = (SOURCES / "include/dct.h").read_text()
    table = text.partition("kTable[65] = {")[2].partition("}")[0]
    cosines = [float(number) for number in re.findall(r"([\d.e-]+)f", table)]
    expected = torch.tensor([_cosine(k) for k in range(64)] + [0.0], dtype=torch.float64)
    assert torch.equal(torch.tensor(cosines, dtype=torch.float32), expected.float())


def test_the_work_of_top_k_has_room_for_its_struct() -> None:
    text, numbers = (SOURCES / "sparse.cu").read_text(), constants("sparse.cu")
    body = text.partition("struct Work {")[2].partition("};")[0]
    words = 0
    for line in re.findall(r"u32 ([^;]*);", body):
        for member in line.split(","):
            sizes = re.findall(r"\[(\w+)\]", member)
            words += math.prod(int(numbers.get(size, 0) or size) for size in sizes)
    assert 4 * words == sparse._WORK_BYTES


def test_a_matrix_of_the_table_has_the_members_of_its_struct() -> None:
    text = re.sub(r"//.*", "", (SOURCES / "include/low_rank.h").read_text())
    body = text.partition("struct Matrix {")[2].partition("};")[0]
    members = re.findall(r"\w+", body.replace("i64", ""))
    assert len(members) == _matrices.Matrices([(0, 2, 3, 1)]).table.shape[1]
