"""Fingerprints: kernels as the definition, and what is known of a gradient by them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.kernels import fingerprint, hash_parts, pieces_of_sizes, sketch_width
from commhooks.kernels.fingerprint import ROWS, Pieces, fingerprint_op, hash_parts_op
from commhooks.kernels.parts import Parts
from tests.kernels.inputs import CPP, DTYPES, plain, tricky, unaligned
from tests.kernels.machines import assert_agree, machines

KERNELS = {
    "fingerprint.cu": [
        *(f"fingerprint_sums<{t}>" for t in ("float", "double")),
        *(f"fingerprint<float, {t}>" for t in CPP.values()),
        "fingerprint<double, double>",
        *(f"hash_parts<{word}>" for word in ("u8", "u16", "u32", "u64")),
    ]
}
SIZES: tuple[tuple[int, ...], ...] = (
    *((), (0,), (1,), (0, 5, 0), (63, 64, 65, 0, 0, 1000), (9000, 1, 8191, 129)),
    tuple(range(40)),
)
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def outputs(
    run: Any,
    mean: Tensor,
    sizes: tuple[int, ...],
    owners: tuple[int, ...] | None = None,
    *,
    begin: int = 0,
    factor: float = 1.0,
    keeps: bool = False,
    residuals: tuple[Tensor | None, Tensor | None] = (None, None),
    sketched: bool = True,
    step: int = 5,
) -> list[Tensor]:
    pieces = Pieces(sizes, owners)
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    gradient = plain(pieces.numel).to(wide)
    rows = torch.full((len(ROWS), pieces.owner_count), 7.0, dtype=torch.float64)
    sketches = torch.full((2 + keeps, pieces.width), 7.0).to(wide) if sketched else None
    place = (pieces.table, begin, factor, keeps, step)
    run(fingerprint_op, gradient, mean, *residuals, *place, rows, sketches)
    # A NaN has no sign that all machines agree on, but the hashes are integers.
    return [rows[:4], rows[4].view(torch.int64), *([] if sketches is None else [sketches])]


def test_kernels_equal_the_definition():
    for sizes in SIZES:
        n = sum(sizes)
        for make, dtype in ((tricky, DTYPES[0]), (unaligned, DTYPES[1]), (plain, DTYPES[2])):
            assert_agree(KERNELS, outputs, make(n, dtype), sizes)
        wide = {"residuals": (tricky(n).double(), plain(n).double() / 3), "factor": 1 / 3}
        assert_agree(KERNELS, outputs, tricky(n).double() / 3, sizes, keeps=True, **wide)
        residuals = (unaligned(n, torch.float32), tricky(n, torch.float32))
        for keeps in (False, True):
            for some in (residuals, (None, residuals[1]), (residuals[0], None)):
                assert_agree(KERNELS, outputs, plain(n), sizes, keeps=keeps, residuals=some)
        assert_agree(KERNELS, outputs, plain(n), sizes, sketched=False)


def test_shards_and_pieces_of_a_parameter_are_as_in_the_definition():
    sizes, owners = (300, 40, 0, 5000, 7, 2100), (1, 0, 2, 1, -1, 0)
    for begin, end in ((0, 7447), (350, 351), (340, 340), (100, 5200), (7447, 7447)):
        mean = plain(end - begin)
        assert_agree(KERNELS, outputs, mean, sizes, owners, begin=begin, factor=3.0, keeps=True)


def test_many_tasks_are_added_up_in_the_same_order():
    sizes = (1024 * 32 * 3 + 77, 700_000, 3)
    some = machines(orders=(5,))
    assert_agree(KERNELS, outputs, plain(sum(sizes)), sizes, on_machines=some)


def test_hashes_equal_the_definition():
    def hashed(run: Any, x: Tensor, sizes: tuple[int, ...], zero: int) -> list[Tensor]:
        out = torch.full((len(sizes),), 7, dtype=torch.int64)
        run(hash_parts_op, x, Parts(sizes).table, zero, out)
        return [out]

    for sizes in (*SIZES, (2048 * 20 + 3, 5000)):
        for dtype in INTEGERS:
            info = torch.iinfo(dtype)
            x = torch.randint(-(2**62), 2**62, (sum(sizes) + 1,)).to(dtype)[1:]
            x[::5], x[::7] = info.min, 0
            for zero in (0, info.min):
                assert_agree(KERNELS, hashed, x, sizes, zero)


def _row(rows: Tensor, name: str) -> Tensor:
    return rows[ROWS.index(name)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_those_of_the_parameters(dtype: torch.dtype) -> None:
    sizes, owners = (300, 20, 8000, 5), (0, 1, 0, -1)
    vectors = [plain(sum(sizes)).to(dtype) * scale for scale in (1.0, 1e-30, 1e30, 3.0)]
    gradient, mean, before, after = vectors
    for keeps in (False, True):
        pieces = pieces_of_sizes(sizes, owners)
        rows = torch.empty(len(ROWS), 2, dtype=torch.float64)
        sketches = torch.empty(2 + keeps, pieces.width, dtype=dtype)
        residuals = (before, after)
        fingerprint(gradient, mean, rows, sketches, pieces, 0, residuals=residuals, keeps=keeps)
        contributed = gradient if keeps else gradient + before - after
        expected = {"gradient": contributed, "mean": mean, "difference": contributed - mean}
        for name, vector in expected.items():
            parts = vector.double().split(sizes)
            norms = torch.stack([torch.cat([parts[0], parts[2]]).norm(), parts[1].norm()])
            torch.testing.assert_close(_row(rows, name).sqrt(), norms, rtol=1e-12, atol=0)
        both = before[300:320].double().square() + after[300:320].double().square()
        torch.testing.assert_close(_row(rows, "residual")[1], 2 * both.sum(), rtol=1e-12, atol=0)
        for sketch, vector in zip(sketches[keeps:], (contributed - mean, mean), strict=True):
            # Up to 64 entries are all there.
            begin = sketch_width(300)
            torch.testing.assert_close(sketch[begin : begin + 20].abs(), vector[300:320].abs())


def test_wrong_arguments_are_named():
    pieces = pieces_of_sizes((9, 4))
    x, rows, sketches = torch.ones(13), torch.empty(5, 2).double(), torch.empty(2, 13)
    with pytest.raises(ValueError, match=r"fingerprint\(rows\): 10 entries, got 8"):
        fingerprint(x, x, rows[:4], sketches, pieces, 0)
    with pytest.raises(ValueError, match=r"fingerprint\(sketches\): 39 entries, got 26"):
        fingerprint(x, x, rows, sketches, pieces, 0, keeps=True)
    with pytest.raises(ValueError, match=r"fingerprint\(begin\): 13 entries of the mean"):
        fingerprint(x, x, rows, sketches, pieces, 0, begin=1)
    with pytest.raises(TypeError, match=r"fingerprint\(mean\): float64 if the gradient is"):
        fingerprint(x, x.double(), rows, sketches, pieces, 0)
    for line, column in ((0, 1), (2, 2), (5, 0), (7, 0)):
        table = pieces.table.clone()
        table[line, column] += 1
        with pytest.raises(ValueError, match=r"fingerprint\(table\): a table as Pieces makes it"):
            fingerprint_op(x, x, None, None, table, 0, 1.0, False, 0, rows, sketches)
    with pytest.raises(TypeError, match=r"hash_parts\(x\)"):
        hash_parts(x, torch.zeros(2, dtype=torch.int64), (9, 4))


def fuzz(run: Any, rng: random.Random) -> None:
    sizes = tuple(rng.choice([0, 1, rng.randrange(300), rng.randrange(9000)]) for _ in range(4))
    n = sum(sizes)
    begin = rng.randrange(n + 1)
    mean = torch.randn(rng.randrange(n - begin + 1) + 1) * 10.0 ** rng.randrange(-44, 38)
    residuals = tuple(rng.choice([None, torch.randn(n + 1)[1:]]) for _ in range(2))
    options: dict[str, Any] = {"begin": begin, "residuals": residuals, "factor": 2.0}
    options |= {"keeps": rng.random() < 0.5, "sketched": rng.random() < 0.8}
    owners = tuple(rng.randrange(-1, 3) for _ in sizes)
    if rng.random() < 0.2:
        options["residuals"] = tuple(x if x is None else x.double() for x in residuals)
        outputs(run, mean.double()[1:], sizes, owners, **options)
    outputs(
        run, mean.to(rng.choice(DTYPES))[1:], sizes, owners, **options | {"residuals": residuals}
    )
    x = torch.randint(0, 2, (n + 1,)).to(rng.choice(INTEGERS))[1:]
    run(hash_parts_op, x, Parts(sizes).table, 1, torch.zeros(4, dtype=torch.int64))
