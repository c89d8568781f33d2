"""Kernels on tensors of more than 2^32 entries, whose places 32 bits do not number.

Both ends of a tensor have the same entries. In between are zeros, which take no memory since only
the first and the last blocks of a grid run: these have to write the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from commhooks.kernels import (
    Matrices,
    Tiles,
    affine,
    blockwise,
    cast,
    levels,
    low_rank,
    parts,
    payload_bytes,
    philox,
    random_k,
    rotated,
    shared,
    votes,
)
from commhooks.kernels.blockwise import segments_for
from commhooks.kernels.dct import decode_cosines_op, encode_cosines_op
from commhooks.kernels.finite import finite_op
from commhooks.kernels.hadamard import hadamard_op
from commhooks.kernels.momentum import add_momentum_op
from commhooks.kernels.norms import quantize_norms_op
from commhooks.kernels.requantize import requantize_op
from commhooks.kernels.runtime import cuda
from commhooks.kernels.scatter import scatter_sum_op
from tests.emulator.runner import emulated
from tests.kernels import (
    test_affine,
    test_blockwise,
    test_dct,
    test_finite,
    test_hadamard,
    test_levels,
    test_low_rank,
    test_momentum,
    test_norms,
    test_parts,
    test_random_k,
    test_rotated,
    test_scaled_cast,
    test_scatter,
    test_shared,
    test_votes,
)
from tests.kernels.fuzz import family_name
from tests.kernels.inputs import plain
from tests.kernels.machines import Runner
from tests.kernels.memory import PAGE, between_guards

N = 2**33
END = 4096  # entries that the first and the last blocks surely work on
TURN = (torch.tensor(3), 7, 2, 0)


def zeros(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor between guards into which places lead that overflow."""
    size = n * dtype.itemsize
    memory = between_guards(-(-size // PAGE) * PAGE, 2**35, before=True)
    return memory[:size].view(dtype)


def entries(n: int = N, *, period: int = END, seed: int = 0) -> Tensor:
    x = zeros(n)
    x[:END] = x[-END:] = plain(period, seed=seed).repeat(END // period)
    return x


def assert_ends_agree(*results: Tensor, n: int = N, end: int = END) -> None:
    """Each has one thing for each entry, or for each so many entries."""
    for result in results:
        count = len(result) * end // n
        assert count
        assert result[:count].any()
        assert torch.equal(result[:count], result[-count:])


def affine_levels(run: Any) -> None:
    for block in (256, 2048):
        x, written = entries(), zeros(N)
        codes, scale, zero = (
            zeros(N, torch.uint8),
            zeros(N // block),
            zeros(N // block, torch.uint8),
        )
        run(affine.quantize_affine_op, x, codes, scale, zero, block)
        run(affine.dequantize_affine_op, codes, scale, zero, block, 0.5, False, written)
        assert_ends_agree(codes, scale, zero, written)


def blocks(run: Any) -> None:
    block, left, written, rest = 256, zeros(N), zeros(N), zeros(N)
    table = segments_for("int8", block, [[N]]).table
    size, form = payload_bytes(N, "int8", block), ("int8", block, table)
    payloads, again = zeros(2 * size, torch.uint8).view(2, size), zeros(size, torch.uint8)
    for seed, payload in enumerate(payloads):
        x = entries(seed=seed)
        run(blockwise.quantize_op, x, payload, *form, -1, x, left, *philox.NO_STREAM, 0, 1)
    run(blockwise.dequantize_op, payloads, written, *form, -1, 0.5, False, *philox.NO_STREAM)
    error = (0.5, rest, 1.0, False, *philox.NO_STREAM)
    run(requantize_op, payloads, again, *form, 0, *error, *philox.NO_STREAM)
    scales = 4 * N // block
    for payload in (*payloads, again):
        assert_ends_agree(payload[:scales], payload[scales:])
    assert_ends_agree(left, written, rest)


def casts(run: Any) -> None:
    x, narrow = entries(), zeros(N, torch.bfloat16)
    run(cast.cast_op, x, narrow, 0.5, *philox.NO_STREAM)
    assert_ends_agree(narrow)


def cosines(run: Any) -> None:
    tiles = Tiles([(1, N)])
    x, new, written = entries(), zeros(N), zeros(N)
    payload = zeros(2 * tiles.count * 4, torch.int16).view(2, -1, 4)
    run(encode_cosines_op, x, x, 0.5, tiles.table, 4, new, payload)
    run(decode_cosines_op, payload[None], tiles.table, False, written)
    assert_ends_agree(new, written)


def momenta(run: Any) -> None:
    x, new, written = entries(), zeros(N), zeros(N)
    run(add_momentum_op, x, x, 0.5, new, written)
    assert_ends_agree(new, written)


def one_that_is_not_finite(run: Any) -> None:
    x, answer = entries(), torch.empty((), dtype=torch.bool)
    for last in (x[-1].item(), math.nan):
        x[-1] = last
        cuda.counters(x.device)[0] = N // 2048 - 5  # the blocks that do not run
        run(finite_op, x, answer)
        assert answer == math.isfinite(last)


def rotations(run: Any) -> None:
    x, turned, back = entries(), zeros(N), zeros(N)  # by signs that differ between places
    run(hadamard_op, x, turned, 1024, False, *TURN, None, -1, False)
    run(hadamard_op, turned, back, 1024, True, *TURN, None, -1, False)
    for end in (slice(END), slice(-END, None)):
        torch.testing.assert_close(back[end], x[end])


def rotated_blocks(run: Any) -> None:
    block, x, left, written = 256, entries(), zeros(N), zeros(N)
    form = ("int8", block, segments_for("int8", block, [[N]], whole=True).table, -1)
    payload = zeros(payload_bytes(N, "int8", block), torch.uint8)
    run(rotated.quantize_rotated_op, x, payload, *form, *TURN, x, left, *philox.NO_STREAM)
    run(rotated.dequantize_rotated_op, payload[None], written, *form, 0.5, False, *TURN)
    for end in (slice(END), slice(-END, None)):
        torch.testing.assert_close(2 * written[end] + left[end], 2 * x[end])


def nearest_levels(run: Any) -> None:
    bits, block, x, left, written = 4, 256, entries(), zeros(N), zeros(N)
    table = levels._table(test_levels.some_levels(bits))
    payload = zeros(levels.level_bytes(N, bits, block), torch.uint8)
    run(levels.quantize_levels_op, x, table, payload[None], left, block, N)
    run(levels.dequantize_levels_op, payload[None, None], table, written, block, N, 1.0)
    scales = 4 * N // block
    assert_ends_agree(payload[:scales], payload[scales:], left, written)


def levels_of_norms(run: Any) -> None:
    block, x = 256, zeros(N)
    x[:END] = x[-END:] = 1.0  # a level, so that nothing is rounded at random
    payload = zeros(payload_bytes(N, "int8", block), torch.uint8)
    run(quantize_norms_op, x, payload, block, 112, *TURN)
    scales = 4 * N // block
    assert_ends_agree(payload[:scales], payload[scales:])


def whole_parts(run: Any) -> None:
    x, written, table = entries(), zeros(N), parts.Parts((N // 2, N // 2)).table
    payloads = zeros(int(table[-1, 3]), torch.uint8)
    run(parts.quantize_parts_op, x, payloads, table)
    run(parts.dequantize_parts_op, payloads, written, table)
    assert_ends_agree(written)


def random_entries(run: Any) -> None:
    n = 2**31 - END  # of fewer than 2^31, as the op demands
    k, x = n // 64, entries(n)
    values, left, written = zeros(k), zeros(n), zeros(n)
    run(random_k.gather_random_op, x, values, None, left, *TURN[:3])
    run(random_k.scatter_random_op, values, written, 1.0, None, *TURN[:3])
    for end in (slice(END), slice(-END, None)):
        assert torch.equal(left[end] + written[end], x[end])
        assert written[end].count_nonzero() == END // 64


def sparse_sums(run: Any) -> None:
    n, k = 2**31, 100
    indices = (torch.arange(k) * 40).int()
    values = torch.randn(1, 2 * k)
    values[0, k:] = values[0, :k]
    written = zeros(n)
    both = torch.cat([indices, indices + (n - END)])
    run(scatter_sum_op, both[None], values, written, 0.5, None)
    assert_ends_agree(written, n=n)


def shared_scales(run: Any) -> None:
    block, x, codes = 256, entries(), zeros(N, torch.int8)
    magnitudes, left, written = zeros(N // block, torch.int32), zeros(N), zeros(N)
    run(shared.magnitudes_op, x, x, magnitudes, block)
    run(shared.quantize_shared_op, x, x, magnitudes, codes, left, block, 127, *philox.NO_STREAM)
    run(shared.dequantize_shared_op, codes, magnitudes, written, block, 127, 0.5)
    assert_ends_agree(magnitudes, codes, left, written)


def ballots(run: Any) -> None:
    x, written, size = entries(), zeros(N), votes.vote_bytes(N)
    payloads = zeros(2 * size, torch.uint8).view(2, 1, size)
    for payload in payloads:
        with mock.patch.object(Tensor, "zero_"):  # it has zeros, which take no memory
            run(votes.pack_votes_op, x, payload, N)
    run(votes.count_votes_op, payloads, written, 0.5, N)
    assert_ends_agree(*payloads[:, 0, : N // 8], written)


def a_large_matrix(run: Any) -> None:
    rows, columns, rank = 2**17, 2**16, 2
    matrices = Matrices([(0, rows, columns, rank)])
    left, right = torch.ones(matrices.left_numel), torch.zeros(rank, columns)
    period = 64  # columns that a warp works on
    right[:, :512] = right[:, -512:] = plain(period, seed=1).repeat(512 // period)
    x, totals, out, unsent = entries(period=period), [zeros(N), zeros(N)], zeros(N), zeros(N)
    factors = (left, right.view(-1))
    made = torch.empty_like(factors[0]), torch.empty_like(factors[1])
    none = (None, None, None)
    run(low_rank.multiply_right_op, x, x, totals[0], matrices.table, factors[1], made[0], *none)
    run(low_rank.multiply_left_op, x, x, totals[1], matrices.table, factors[0], made[1], *none)
    run(low_rank.expand_op, *factors, matrices.table, out, *none)
    run(low_rank.subtract_op, totals[0], matrices.table, *factors, unsent, None, None)
    assert_ends_agree(*totals, out, unsent, end=period)


CASES: dict[ModuleType, Callable[[Any], None]] = {
    test_affine: affine_levels,
    test_blockwise: blocks,
    test_dct: cosines,
    test_finite: one_that_is_not_finite,
    test_hadamard: rotations,
    test_levels: nearest_levels,
    test_low_rank: a_large_matrix,
    test_momentum: momenta,
    test_norms: levels_of_norms,
    test_parts: whole_parts,
    test_random_k: random_entries,
    test_rotated: rotated_blocks,
    test_scaled_cast: casts,
    test_scatter: sparse_sums,
    test_shared: shared_scales,
    test_votes: ballots,
}


# Families of the longest index arithmetic; all others are marked slow.
AT_EVERY_RUN = {
    *(test_blockwise, test_levels, test_low_rank, test_parts, test_rotated, test_scaled_cast),
    *(test_scatter, test_votes),
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in AT_EVERY_RUN else pytest.mark.slow)
        for family in CASES
    ],
    ids=family_name,
)
def test_both_ends_of_a_large_tensor_agree(family: ModuleType) -> None:
    of_formats = getattr(family, "kernels_of", None)
    with emulated(of_formats("int8") if of_formats else family.KERNELS, ends=True):
        CASES[family](Runner("cuda"))
