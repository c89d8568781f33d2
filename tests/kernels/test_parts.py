"""Ops on all parts of a bucket: each part as by itself, and kernels as the definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commhooks.kernels import (
    dequantize,
    dequantize_parts,
    part_bytes,
    payload_bytes,
    quantize,
    quantize_parts,
    segments_for,
    squared_norms,
)
from commhooks.kernels.parts import Parts, dequantize_parts_op, quantize_parts_op, squared_norms_op
from tests.kernels.inputs import CPP, DTYPES, plain, tricky, unaligned
from tests.kernels.machines import assert_agree, machines

KERNELS = {
    "parts.cu": [
        *("quantize_parts", "dequantize_parts", "squared_norms"),
        *(f"squares<{t}>" for t in CPP.values()),
    ]
}
SIZES: tuple[tuple[int, ...], ...] = (
    *((), (0,), (1,), (0, 5, 0), (255, 256, 257, 0, 0, 1000), (5000, 1, 2049, 31)),
    tuple(range(40)),
)


def outputs(run: Any, x: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    table, wide = Parts(sizes).table, x.float()
    payloads = torch.full((int(table[-1, 3]),), 77, dtype=torch.uint8)
    norms, out = torch.full((len(sizes),), 7.0, dtype=torch.float64), torch.full_like(wide, 7.0)
    run(squared_norms_op, x, norms, table)
    run(quantize_parts_op, wide, payloads, table)
    run(dequantize_parts_op, payloads, out, table)
    return [payloads, out, norms]


def test_kernels_equal_the_definition():
    for sizes in SIZES:
        for make, dtype in ((tricky, DTYPES[0]), (unaligned, DTYPES[1]), (plain, DTYPES[2])):
            assert_agree(KERNELS, outputs, make(sum(sizes), dtype), sizes)


def test_many_chunks_are_added_in_the_same_order():
    sizes = (2048 * 300 + 7, 2048 * 257, 3)  # more chunks than threads of a block

    def norms(run: Any, x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.empty(3, dtype=torch.float64)
        run(squared_norms_op, x, out, Parts(sizes).table)
        return [out]

    assert_agree(KERNELS, norms, plain(sum(sizes)), on_machines=machines(orders=(5,)))


def test_each_part_is_quantized_as_by_itself():
    sizes = (300, 0, 1, 5000)
    x = plain(sum(sizes))
    nbytes = [part_bytes(n) for n in sizes]
    payloads, out = torch.empty(sum(nbytes)).byte(), torch.empty_like(x)
    quantize_parts(x, payloads, sizes)
    dequantize_parts(payloads, out, sizes)
    for part, decoded in zip(x.split(sizes), out.split(sizes), strict=True):
        n = part.numel()
        segments = segments_for("int8", 256, [[n]], whole=True)
        expected = torch.empty(payload_bytes(segments, "int8", 256)).byte()
        entries = torch.empty_like(part)
        quantize(part, expected, "int8", 256, segments=segments)
        dequantize(expected[None], entries, "int8", 256, segments=segments)
        assert torch.equal(decoded, entries)
    assert nbytes == [336, 0, 48, 5104]  # saved states have these


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_squared_norms_are_those_of_the_parts(dtype):
    sizes = (300, 0, 1, 5000)
    x, out = plain(sum(sizes)).to(dtype), torch.empty(4, dtype=torch.float64)
    squared_norms(x, out, sizes)
    expected = torch.stack([part.double().square().sum() for part in x.split(sizes)])
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=0)


def fuzz(run: Any, rng: random.Random) -> None:
    sizes = tuple(rng.choice([0, 1, rng.randrange(300), rng.randrange(9000)]) for _ in range(4))
    x = torch.randn(sum(sizes) + 1) * 10.0 ** rng.randrange(-44, 38)
    outputs(run, x.to(rng.choice(DTYPES))[1:], sizes)
