"""Quantisation of rotated entries: the transform and the format in one pass, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from commhooks.kernels import (
    dequantize,
    dequantize_rotated,
    hadamard,
    payload_bytes,
    philox,
    quantize,
    quantize_rotated,
    rotated,
    segments_for,
)
from tests.kernels.inputs import CPP, cut, cut_rows, plain, tricky
from tests.kernels.machines import assert_agree

FORMATS = {"int8": "Int8", "int4": "Int4", "int2": "Int2", "sign": "Sign"}
# (dtype, block) that are tried with every format.
TRIED = (
    *((torch.float32, block) for block in (128, 256, 1024)),
    (torch.float16, 256),
    (torch.bfloat16, 512),
)


def kernels_of(*formats: str) -> dict[str, list[str]]:
    """Returns the kernels of some formats: to compile those of all for the emulator takes long."""
    names = [
        f"{op}<{FORMATS[name]}, {CPP[dtype]}, {block}>"
        for op in ("quantize_rotated", "dequantize_rotated")
        for name in formats
        for dtype, block in TRIED
    ]
    return {"rotated.cu": names}


KERNELS = kernels_of(*FORMATS)
TURN = (torch.tensor(3), 2**40 + 17, 2, 4096)
NOISE = (torch.tensor(5), 12, 3, 512)


def outputs(run: Any, x: torch.Tensor, format: str, block: int, *, full: bool) -> list[Any]:
    n = x.numel()
    kept, left = (plain(n, seed=1), torch.full((n,), 5.0)) if full else (None, None)
    noise = NOISE if full else philox.NO_STREAM
    results = []
    for parts in ([cut(n)], cut_rows(n)):
        segments = segments_for(format, block, parts, whole=True)
        payload = torch.full(
            (len(parts), payload_bytes(segments, format, block)), 77, dtype=torch.uint8
        )
        settings = (format, block, segments.table, -1)
        run(rotated.quantize_rotated_op, x, payload, *settings, *TURN, kept, left, *noise)
        results += [payload] if left is None else [payload, left.clone()]
        if n:
            out = torch.full((n,), 7.0).to(x.dtype)
            payloads = torch.stack([payload] * 3)
            run(rotated.dequantize_rotated_op, payloads, out, *settings, 0.4, full, *TURN)
            results.append(out)
    row, (begin, end) = 3, segments.row(3)  # by itself
    single, alone = torch.full_like(payload[0], 77), torch.full((end - begin,), 7.0).to(x.dtype)
    settings = (format, block, segments.table, row)
    run(rotated.quantize_rotated_op, x[begin:end], single, *settings, *TURN, None, None, *noise)
    run(rotated.dequantize_rotated_op, single[None], alone, *settings, 0.4, False, *TURN)
    return [*results, single, alone]


@pytest.mark.parametrize("format", FORMATS)
def test_kernels_equal_the_definition(format):
    for dtype, block in TRIED:
        for n in (0, 1, block, 3 * block - 5, 5000 // block * block, 4999):
            for full in (False, True):
                x = tricky(n, dtype)
                assert_agree(kernels_of(format), outputs, x, format, block, full=full)


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_the_transform_and_then_the_format(format):
    x, step = plain(4096), torch.tensor(1)
    rotation = philox.RandomBits(1, step)
    turned, payloads = torch.empty(4096), torch.empty(2, payload_bytes(4096, format, 512)).byte()
    hadamard(x, turned, 512, rotation)
    quantize(turned, payloads[0], format, 512)
    quantize_rotated(x, payloads[1], format, 512, rotation)
    assert torch.equal(*payloads)
    outs = torch.empty(2, 4096)
    dequantize(payloads[:1], outs[0], format, 512)
    hadamard(outs[0], outs[0], 512, rotation, inverse=True)
    dequantize_rotated(payloads[1:], outs[1], format, 512, rotation)
    assert torch.equal(*outs)


def fuzz(run: Any, rng: random.Random) -> None:
    (dtype, block), format = rng.choice(TRIED), rng.choice(list(FORMATS))
    n = rng.choice([block * rng.randrange(5), rng.randrange(3000)])
    x = (torch.randn(n) * 10.0 ** rng.randrange(-44, 38)).to(dtype)
    kept, left = (torch.randn(n) if rng.random() < 0.5 else None for _ in range(2))
    turn = (torch.tensor(rng.randrange(2**40)), rng.randrange(2**63), 1, 4096 * rng.randrange(5))
    noise = NOISE if rng.random() < 0.5 else philox.NO_STREAM
    segments = segments_for(format, block, rng.choice([[cut(n)], cut_rows(n)]), whole=True)
    form, rows = (format, block, segments.table, -1), len(segments.rows)
    payload = torch.empty(rows, payload_bytes(segments, format, block), dtype=torch.uint8)
    run(rotated.quantize_rotated_op, x, payload, *form, *turn, kept, left, *noise)
    payloads = torch.randint_like(payload.repeat(3, 1, 1), 256)
    run(rotated.dequantize_rotated_op, payloads, x, *form, 0.5, rng.random() < 0.5, *turn)
