"""Blockwise formats: all implementations agree, and they are what they say they are."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.kernels import blockwise, philox, use_kernels
from commhooks.kernels._blockwise import Payload, one_segment
from commhooks.kernels.blockwise import FORMATS, dequantize, payload_bytes, quantize, segments_for
from commhooks.kernels.requantize import requantize, requantize_op
from tests.kernels.inputs import CPP, DTYPES, LARGE, SIZES, cut, cut_rows, plain, tricky, unaligned
from tests.kernels.machines import assert_agree, machines

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
# (dtype, block) that are tried with every format.
TRIED = (
    *((torch.float32, block) for block in BLOCKS),
    (torch.float16, 128),
    (torch.float16, 256),
    (torch.bfloat16, 256),
)
SHARES = 5  # of all cases; each has every size and every block
DRAWS = philox.RandomBits(7, torch.tensor(3))
UNDITHERED = [name for name, form in FORMATS.items() if not form.dithered]
# Each has code of its own.
AT_EVERY_RUN = {"int8", "int4", "e4m3", "mx_e5m2", "sign", "dithered_int8"}


def kernels_of(*formats: str) -> dict[str, list[str]]:
    """Returns the kernels of some formats: to compile those of all for the emulator takes long."""
    forms = [FORMATS[name] for name in formats]
    quantize = [
        f"quantize<{form.cpp}, {CPP[dtype]}, {block}>"
        for form in forms
        for dtype, block in TRIED
        if block >= form.unit
    ]
    requantize = [f"requantize<{form.cpp}, 256>" for form in forms]
    dequantize = [f"dequantize<{form.cpp}, {cpp}>" for form in forms for cpp in CPP.values()]
    return {"blockwise.cu": [*quantize, *requantize, *dequantize]}


KERNELS = kernels_of(*FORMATS)


def outputs(
    run: Any, x: Tensor, format: str, block: int, *, residual: bool, noise: bool
) -> dict[str, Tensor]:
    """Everything that the three ops write."""
    n = x.numel()
    kept = plain(n, seed=1) if residual else None
    left = torch.full((n,), 5.0) if residual else None
    key = (torch.tensor(3), 2**40 + 17, 2, 512)
    random = key if noise or FORMATS[format].dithered else philox.NO_STREAM
    draws = key if FORMATS[format].dithered else philox.NO_STREAM
    segments = segments_for(format, block, [cut(n)])
    table = segments.table
    payload = torch.full((payload_bytes(segments, format, block),), 77, dtype=torch.uint8)
    run(blockwise.quantize_op, x, payload, format, block, table, -1, kept, left, *random, 1, 3)
    results = {"payload": payload}
    if left is not None:
        results["left"] = left
    if n == 0:
        return results
    payloads = torch.stack([payload, payload.roll(len(payload) // 2), payload])
    payloads[1] = payload
    for dtype in DTYPES:
        out = torch.full((n,), 7.0).to(dtype)
        arguments = (format, block, table, -1, 1 / 3, False, *draws)
        run(blockwise.dequantize_op, payloads, out, *arguments)
        results[f"sum, {dtype}"] = out
    out = torch.full((n,), 7.0).to(x.dtype)
    run(blockwise.dequantize_op, payloads[:1], out, format, block, table, -1, -1.0, True, *draws)
    results["accumulated"] = out
    if block == 256:
        again = torch.full_like(payload, 77)
        rest = None if left is None else left.clone()
        run(
            requantize_op,
            *(payloads[:2], again, format, block, table, 0, 0.5, rest, 3.0, noise),
            *(*draws, *random),
        )
        results["again"] = again
        if rest is not None:
            results["rest"] = rest
        return results | in_rows(run, x, format, block, kept, random, draws)
    return results


def in_rows(
    run: Any, x: Tensor, format: str, block: int, kept: Tensor | None, random: Any, draws: Any
) -> dict[str, Tensor]:
    """The same as a message of six rows, which differ in length, and of which one is empty."""
    n = x.numel()
    segments = segments_for(format, block, cut_rows(n))
    left = torch.full((n,), 5.0)
    rows = torch.full((6, payload_bytes(segments, format, block)), 77, dtype=torch.uint8)
    form = (format, block, segments.table)
    run(blockwise.quantize_op, x, rows, *form, -1, kept, left, *random, 0, 1)
    out = torch.full((n,), 7.0).to(x.dtype)
    messages = torch.stack([rows, rows])
    run(blockwise.dequantize_op, messages, out, *form, -1, 0.5, False, *draws)
    # One row by itself, in the layout of all.
    again, begin, end = torch.full_like(rows[0], 77), *segments.row(3)
    arguments = (rows[3:4], again, *form, 3, 0.5, None, 1.0, False)
    run(requantize_op, *arguments, *draws, *random)
    alone, payload = torch.full((end - begin,), 7.0), torch.full_like(rows[0], 77)
    run(blockwise.dequantize_op, rows[3:4], alone, *form, 3, 0.5, False, *draws)
    part = (x[begin:end], payload, *form, 3)
    run(blockwise.quantize_op, *part, None, None, *random, 1, 3)
    names = ("rows", "rows, left", "rows, sum", "row, again", "row, sum", "row")
    return dict(zip(names, (rows, left, out, again, alone, payload), strict=True))


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(name, marks=() if name in AT_EVERY_RUN else pytest.mark.slow)
        for name in FORMATS
    ],
)
@pytest.mark.parametrize(
    "share", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, SHARES))]
)
def test_kernels_equal_the_definition(share, format):
    pairs = itertools.cycle([(False, False), (True, True), (False, True), (True, False)])
    first = (share + list(FORMATS).index(format)) % SHARES
    cases = [*itertools.product(TRIED, SIZES)][first::SHARES]
    # More than the emulator's grid, in which teams of warps take several turns.
    for (dtype, block), n in (*cases, ((torch.float32, 2048), 40_001)):
        if block >= FORMATS[format].unit:
            make = unaligned if n % 2 else tricky
            for residual, noise in itertools.islice(pairs, 2 + (dtype == torch.float32)):
                x = make(n, dtype)
                case = {"residual": residual, "noise": noise}
                assert_agree(kernels_of(format), outputs, x, format, block, **case)


@pytest.mark.parametrize("format", ["int8", "int4", "e4m3", "sign"])
def test_kernels_equal_the_definition_on_large_buckets(format):
    for n in LARGE:
        case = {"residual": True, "noise": True, "on_machines": machines(orders=(0,))}
        assert_agree(kernels_of(format), outputs, tricky(n), format, 256, **case)


def bits_for(format: str, stream: philox.RandomBits | None = None) -> dict[str, Any]:
    """Bits that the decoder of a format needs."""
    return {"random": stream or DRAWS} if FORMATS[format].dithered else {}


def decoded(x: Tensor, format: str, block: int, stream: philox.RandomBits | None = None) -> Tensor:
    payload = torch.empty(payload_bytes(x.numel(), format, block), dtype=torch.uint8)
    draws = bits_for(format, stream)
    quantize(x, payload, format, block, **draws or {"random": stream})
    out = torch.empty_like(x, dtype=torch.float32)
    dequantize(payload[None], out, format, block, **draws)
    return out


def nearest_values(format: str) -> Tensor:
    """All values of a format's codes, by brute force."""
    form = FORMATS[format]
    if format == "e2m1":
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        return torch.cat([-magnitudes, magnitudes]).unique()
    if form.float8 is None:
        return torch.arange(-form.top, form.top + 1)
    values = torch.arange(256, dtype=torch.uint8).view(form.float8).to(torch.float32)
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("format", [name for name in UNDITHERED if name != "sign"])
def test_codes_are_the_nearest_ones(format):
    block = 256
    x = plain(4 * block).view(4, block)
    values = nearest_values(format)
    actual = decoded(x.flatten(), format, block).view(4, block)
    for row, decoded_row in zip(x, actual, strict=True):
        largest = row.abs().max()
        scale = largest / FORMATS[format].top
        if format.startswith("mx"):
            exponent = torch.floor(torch.log2(largest)) - torch.floor(torch.log2(values.max()))
            scale = 2.0**exponent
        distance = (row[:, None] - values * scale).abs().amin(1)
        error = (row - decoded_row).abs()
        assert (error <= distance * (1 + 1e-5) + largest * 1e-6).all()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_left_completes_what_was_sent(format):
    x, residual = plain(3000), plain(3000, seed=1)
    left = torch.empty_like(x)
    payload = torch.empty(payload_bytes(3000, format, 256), dtype=torch.uint8)
    draws = bits_for(format)
    quantize(x, payload, format, 256, residual=residual, unsent=left, **draws)
    out = torch.empty_like(x)
    dequantize(payload[None], out, format, 256, **draws)
    assert torch.equal(left, (x + residual) - out)  # not only almost: one rounding
    in_place = residual.clone()
    quantize(x, payload, format, 256, residual=in_place, unsent=in_place, **draws)
    assert torch.equal(in_place, left)


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_that_are_not_finite_or_tiny(format):
    x = plain(8 * 256)
    x[256] = float("nan")
    x[512] = float("inf")
    x[1023] = -float("inf")
    x[1024:1280] *= 2.0**-130 / x[1024:1280].abs().max()
    x[1280:1536] = 0.0
    # A dither goes half a step beyond the largest entry.
    x[1536:1792] *= (3.3e38 if FORMATS[format].dithered else 3.4e38) / x[1536:1792].abs().max()
    rows = decoded(x, format, 256).view(8, 256)
    assert not rows[1:4].isfinite().any()
    assert (rows[4:6] == 0).all()
    assert rows[[0, 6, 7]].isfinite().all()
    assert (rows[6] != 0).any()


@pytest.mark.parametrize("format", FORMATS)
def test_the_sign_of_nan_is_not_sent(format):
    # A CPU keeps it through sums, and a GPU does not.
    x, segments = plain(300), segments_for(format, 256, [[300]])
    payload = torch.zeros(2, payload_bytes(segments, format, 256), dtype=torch.uint8)
    for mode in ("definition", "native"):
        for bits, out in zip((0x7FC00000, -0x400000), payload, strict=True):
            x.view(torch.int32)[torch.tensor([3, 299])] = bits  # in a block, and in 16 bits
            with use_kernels(mode):
                quantize(x, out, format, 256, segments=segments, random=DRAWS)
        assert torch.equal(*payload)


@pytest.mark.parametrize("format", ["int8", "int4", "int2", "e4m3", "e5m2", "e2m1"])
def test_stochastic_rounding_is_unbiased(format):
    x = plain(512)
    draws = 2000
    total = torch.zeros_like(x)
    for step in range(draws):
        total += decoded(x, format, 256, philox.RandomBits(7, torch.tensor(step)))
    # Its neighbours among the values, and how often the upper one should come.
    values = nearest_values(format)
    scale = x.view(2, 256).abs().amax(1).repeat_interleave(256) / FORMATS[format].top
    upper = torch.searchsorted(values, x / scale).clamp(1, len(values) - 1)
    low, high = values[upper - 1] * scale, values[upper] * scale
    share = ((x - low) / (high - low)).clamp(0, 1)
    often = torch.minimum(share, 1 - share) * draws > 20  # enough for a normal distribution
    deviation = (high - low) * (share * (1 - share) / draws).sqrt()
    z = ((total / draws - x) / deviation)[often]
    assert len(z) > 250
    assert z.mean().abs() < 4 / len(z) ** 0.5
    assert 0.85 < z.std() < 1.15
    assert z.abs().max() < 5


def test_a_dither_is_unbiased_and_has_the_variance_of_its_page():
    # Entries in units of a step: around the values of the grid near zero, and above.
    steps = torch.cat([torch.linspace(0, 3, 64), torch.linspace(0, 126.5, 64), torch.zeros(128)])
    steps[:128:2] *= -1
    steps[255] = 126.5  # so that the scale is 1
    draws = [philox.RandomBits(7, torch.tensor(step)) for step in range(4000)]
    errors = torch.stack([decoded(steps, "dithered_int8", 256, stream) for stream in draws]) - steps
    places = steps.abs()
    # From a step on, the error is uniform in a step. Smaller entries become a in (1/2, c), or zero.
    variance = errors.var(0)
    z = errors.mean(0) / (variance / len(errors)).sqrt().clamp(min=1e-9)
    assert z.abs().max() < 4.5
    assert (errors[:, steps == 0] == 0).all()
    assert variance[places >= 1].numpy() == pytest.approx(1 / 12, rel=0.15)
    c = (2 * places + 0.25).sqrt()
    below = ((c - places) ** 3 - (0.5 - places) ** 3) / 3 + (1.5 - c) * places**2
    small = (places > 0.02) & (places < 1)
    assert variance[small].numpy() == pytest.approx(below[small].numpy(), rel=0.15)
    # Any two entries have independent errors, so that those of sums add up.
    among = errors[:, places >= 1]
    signs = torch.randn(among.shape[1], 40).sign()
    of_sums = (among @ signs).var(0) / among.shape[1]
    assert of_sums.numpy() == pytest.approx(1 / 12, rel=0.2)


def test_random_bits_belong_to_places():
    x, step = plain(2048), torch.tensor(1)
    whole = decoded(x, "int4", 64, philox.RandomBits(5, step))
    parts = [
        decoded(part, "int4", 64, philox.RandomBits(5, step, first=begin))
        for begin, part in ((0, x[:768]), (768, x[768:]))
    ]
    assert torch.equal(whole, torch.cat(parts))
    for other in (
        philox.RandomBits(6, step),
        philox.RandomBits(5, torch.tensor(2)),
        philox.RandomBits(5, step, number=1),
        philox.RandomBits(5, step, first=256),
    ):
        assert not torch.equal(whole, decoded(x, "int4", 64, other))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_a_message_is_packed_alike_by_itself(format):
    x, step, block = plain(3000), torch.tensor(1), 256
    segments = segments_for(format, block, [[700, 324], [976, 48], [952], []])
    random = philox.RandomBits(5, step, first=512)
    rows = torch.empty(4, payload_bytes(segments, format, block), dtype=torch.uint8)
    left, out = torch.empty(3000), torch.empty(3000)
    quantize(x, rows, format, block, segments=segments, unsent=left, random=random)
    draws = bits_for(format, random)
    dequantize(rows[None], out, format, block, segments=segments, **draws)
    assert not rows[3].any()
    for row in range(3):
        part, payload = slice(*segments.row(row)), torch.empty_like(rows[0])
        error, alone = torch.empty_like(x[part]), torch.empty_like(x[part])
        place = {"segments": segments, "row": row}
        quantize(x[part], payload, format, block, **place, unsent=error, random=random.row(row))
        draws = bits_for(format, random.row(row))
        dequantize(payload[None], alone, format, block, **place, **draws)
        assert torch.equal(payload, rows[row])
        assert torch.equal(error, left[part])
        assert torch.equal(alone, out[part])


@pytest.mark.parametrize("format", UNDITHERED)
def test_a_segment_is_coded_as_if_it_were_alone(format):
    sizes = (700, 20, 3, 256, 131, 1000)
    x = torch.cat([plain(n, seed=n) * 10.0 ** (i - 3) for i, n in enumerate(sizes)])
    segments = segments_for(format, 256, [sizes])
    payload = torch.empty(payload_bytes(segments, format, 256), dtype=torch.uint8)
    quantize(x, payload, format, 256, segments=segments)
    out = torch.empty_like(x)
    dequantize(payload[None], out, format, 256, segments=segments)
    alone = [decoded(part, format, 256) for part in x.split(sizes)]
    assert torch.equal(out, torch.cat(alone))


@pytest.mark.parametrize("mode", ["definition", "auto"])
def test_a_message_of_empty_rows_has_no_bytes(mode):
    segments = segments_for("int8", 256, [[], []])
    with use_kernels(mode):
        quantize(torch.empty(0), torch.empty(2, 0).byte(), "int8", 256, segments=segments)


def test_philox_gives_the_known_answer():
    # Random123's, for a counter and a key of zeros and 7 rounds.
    words = philox._philox(torch.tensor([0]), step=0, seed=0, stream=0).flatten().tolist()
    assert [f"{word:08x}" for word in words] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]


def test_sizes_on_the_wire():
    n = 2**20
    assert payload_bytes(n, "int8", 256) * 8 / n <= 8.2
    assert payload_bytes(n, "int4", 256) * 8 / n <= 4.2
    assert payload_bytes(n, "sign", 2048) * 8 / n <= 1.05
    assert payload_bytes(n, "mx_e4m3", 32) * 8 / n == 8.25
    assert payload_bytes(0, "int8", 256) == 0
    for format, n in itertools.product(FORMATS, (1, 33, 257, 5001)):
        assert payload_bytes(n, format, 256) % 16 == 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_segment_costs_a_block_of_padding_at_most(format, block):
    if block < FORMATS[format].unit:
        return
    granule = max(block, 256)
    unit_bytes = Payload.of(FORMATS[format], block, granule).bytes
    for n in (1, 17, 130, 255, 257, 1100, 2049):
        nbytes = payload_bytes(n, format, block)
        exact = Payload.of(FORMATS[format], block, n // granule * granule).bytes
        # Parts begin at 16 bytes.
        assert nbytes <= exact + min(unit_bytes, 2 * (n % granule)) + 32, n


@pytest.mark.parametrize("format", FORMATS)
def test_requantize_is_dequantize_then_quantize(format):
    n = 5000
    payloads = torch.empty(3, payload_bytes(n, format, 256), dtype=torch.uint8)
    for rank in range(3):
        place = {"rank": rank, "ranks": 3} | bits_for(format)
        quantize(plain(n, seed=rank), payloads[rank], format, 256, **place)
    total = torch.empty(n)
    dequantize(payloads, total, format, 256, factor=1 / 3, **bits_for(format))
    expected, actual = torch.empty_like(payloads[0]), torch.empty_like(payloads[0])
    stream = philox.RandomBits(1, torch.tensor(4))
    quantize(total, expected, format, 256, random=stream)
    segments = segments_for(format, 256, [[n]])
    received = bits_for(format).get("random")
    requantize(
        payloads, actual, segments, format, 256, factor=1 / 3, received=received, random=stream
    )
    assert torch.equal(expected, actual)


def fuzz(run: Any, rng: random.Random) -> None:
    """One random call of every op, on buffers that end where they must."""
    format = rng.choice(list(FORMATS))
    block = rng.choice([b for b in BLOCKS if b >= FORMATS[format].unit])
    n = rng.choice([0, 1, rng.randrange(300), rng.randrange(5000)])
    dtype = rng.choice(list(CPP)) if block == 256 else torch.float32
    shift = rng.randrange(4)
    x = (torch.randn(n + shift) * 10.0 ** rng.randrange(-44, 38)).to(dtype)[shift:]
    if n and rng.random() < 0.3:
        x[rng.randrange(n)] = rng.choice([float("nan"), float("inf"), -0.0])
    kept = torch.randn(n) if rng.random() < 0.5 else None
    left = torch.empty(n) if rng.random() < 0.5 else None
    step = torch.tensor(rng.randrange(2**40)) if rng.random() < 0.5 else None
    key = (step, rng.randrange(2**63), rng.randrange(2**31), 256 * rng.randrange(9))
    payload = torch.empty(payload_bytes(n, format, block), dtype=torch.uint8)
    table = one_segment(format, block, n).table
    draws = philox.NO_STREAM
    if FORMATS[format].dithered:
        key = draws = (torch.tensor(rng.randrange(2**40)), *key[1:])
    key = (*key, *rng.choice([(0, 1), (2, 5)]))
    run(blockwise.quantize_op, x, payload, format, block, table, -1, kept, left, *key)
    ends = sorted(rng.randrange(n + 1) for _ in range(rng.randrange(4)))
    parts = [end - begin for begin, end in itertools.pairwise([0, *ends, n])]
    segments = segments_for(format, block, rng.choice([[parts], [[part] for part in parts]]))
    rows = torch.empty(len(segments.rows), payload_bytes(segments, format, block)).byte()
    form = (format, block, segments.table)
    run(blockwise.quantize_op, x, rows, *form, -1, kept, left, *key)
    run(blockwise.dequantize_op, rows[None], x, *form, -1, 0.5, True, *draws)
    row = rng.randrange(len(segments.rows))
    begin, end = segments.row(row)
    run(blockwise.dequantize_op, rows[row : row + 1], x[begin:end], *form, row, 0.5, True, *draws)
    if n:
        payloads = payload.repeat(rng.randrange(1, 5), 1)
        payloads[-1] = torch.randint_like(payload, 256)  # any bytes
        flag = rng.random() < 0.5
        run(blockwise.dequantize_op, payloads, x, format, block, table, -1, 0.5, flag, *draws)
        if block == 256:
            error = (0.5, left, 3.0, flag)
            run(requantize_op, payloads, payload, format, block, table, 0, *error, *draws, *key[:4])
