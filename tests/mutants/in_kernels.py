"""Bugs in the definitions of ops, which the kernels are compared with."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

KERNELS = "tests/kernels"
EQUAL = "test_kernels_equal_the_definition"

MUTANTS: list[Mutant] = [
    *planted(
        "kernels/_blockwise_definition.py",
        (
            "integers are cut off",
            "return y.round().to(torch.int32) & (1 << form.bits) - 1",
            "return y.floor().to(torch.int32) & (1 << form.bits) - 1",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "a short block's mean magnitude is of a whole one",
            "return sums[:, 0] * (torch.full_like(counts, block) / counts)",
            "return sums[:, 0]",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "zero is negative",
            "return (y < 0).to(torch.int32)",
            "return (y <= 0).to(torch.int32)",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "a block that is not finite arrives as zeros",
            "torch.where(dead, 0.0, scale), torch.nan)",
            "torch.where(dead, 0.0, scale), 0.0)",
            f"{KERNELS}/test_blockwise.py::test_kernels_equal_the_definition",
        ),
    ),
    *planted(
        "kernels/philox.py",
        (
            "random bits have a round less",
            "_ROUNDS = 7  #",
            "_ROUNDS = 6  #",
            f"{KERNELS}/test_blockwise.py::test_philox_gives_the_known_answer",
        ),
        (
            "random numbers are never below a half",
            "return (2 * half_words - 65535).to(torch.float32)",
            "return (2 * half_words - 32768).to(torch.float32)",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/hadamard.py",
        (
            "the definition's rotation is not orthonormal",
            "rows = rows * torch.tensor(block**-0.5,",
            "rows = rows * torch.tensor(block**-0.49,",
            f"{KERNELS}/test_hadamard.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/dct.py",
        (
            "the first cosine of a half is too long",
            "return torch.cat([a[:, :1] * root,",
            "return torch.cat([a[:, :1] * 2.0,",
            f"{KERNELS}/test_dct.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/sparse.py",
        (
            "of equal magnitudes one is missing",
            "first = equal.cumsum(0) <= k - above.sum()",
            "first = equal.cumsum(0) > equal.sum() - (k - above.sum())",
            f"{KERNELS}/test_sparse.py::{EQUAL}",
        ),
        (
            "added entries are not weighted",
            "flat[places[valid]] += entries[valid] * factor",
            "flat[places[valid]] += entries[valid]",
            f"{KERNELS}/test_sparse.py::test_scatter_adds_in_order",
        ),
    ),
    *planted(
        "kernels/levels.py",
        (
            "the scale of levels is biased",
            "unit * (square / product)",
            "unit * (product / square)",
            f"{KERNELS}/test_levels.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/affine.cu",
        (
            "ranges of chunks are read before they are written",
            "parts[part] = found;\n            __syncthreads();\n",
            "parts[part] = found;\n",
            f"{KERNELS}/test_affine.py::test_the_range_of_a_long_block_is_found_by_many_warps",
        ),
        (
            "the chunks of a block are read by one warp of eight",
            "widen(found, parts[other]);",
            "widen(found, parts[0]);",
            f"{KERNELS}/test_affine.py::test_the_range_of_a_long_block_is_found_by_many_warps",
        ),
        (
            "a span has the level of zero of its first block",
            "distance = scale[next], middle = (float)zero[next];",
            "distance = scale[next];",
            f"{KERNELS}/test_affine.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/shared.cu",
        (
            "of a long block the last chunk is taken for the largest",
            "else atomicMax(out + b, most);",
            "else out[b] = most;",
            f"{KERNELS}/test_shared.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/shared.py",
        (
            "the largest magnitude of a long block begins with what was there",
            "        out.zero_()  # several",
            "        pass  # several",
            f"{KERNELS}/test_shared.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/levels.cu",
        (
            "the search for the nearest level goes wrong by one bound",
            "own.bound, (int)(number + step - 1))",
            "own.bound, (int)(number + step))",
            f"{KERNELS}/test_levels.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/bitmap.cu",
        (
            "bits after the last of a bitmap are read",
            "if (count >= 8 && (u64)from % 8 == 0) return",
            "if ((u64)from % 8 == 0) return",
            f"{KERNELS}/test_bitmap.py::{EQUAL}_and_undo_one_another",
        ),
    ),
    *planted(
        "kernels/dct.cu",
        (
            "half of a chunk is read before all lanes have written it",
            "= from[k * kCosines]; });\n            __syncwarp();\n",
            "= from[k * kCosines]; });\n",
            f"{KERNELS}/test_dct.py::{EQUAL}",
        ),
        (
            "the second half of a chunk overwrites the first before it is read",
            "            __syncwarp();  // what was here before has been read\n",
            "",
            f"{KERNELS}/test_dct.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/parts.py",
        (
            "a norm is of the largest chunk",
            "out[index] = summed(chunks[None], _THREADS)[0]",
            "out[index] = chunks.max()",
            f"{KERNELS}/test_parts.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/parts.cu",
        (
            "a part's blocks go on into the next part",
            "entries_in<kBlock>(at, next.begin)",
            "entries_in<kBlock>(at, parts[count].begin)",
            f"{KERNELS}/test_parts.py::{EQUAL}",
        ),
        (
            "sums of chunks are added before all are there",
            "        columns[thread] = sum;\n        __syncthreads();\n",
            "        columns[thread] = sum;\n",
            f"{KERNELS}/test_parts.py::{EQUAL}",
        ),
        (
            "bytes between the scales and codes of a part are left as they were",
            "payloads[end + lane()] = 0;",
            ";",
            f"{KERNELS}/test_parts.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/norms.py",
        (
            "a code is of the square of the norm",
            "places = (y * (top / root)[:, None])",
            "places = (y * (top / (root * root))[:, None])",
            f"{KERNELS}/test_norms.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/norms.cu",
        (
            "rows of a long block share random bits",
            "(((u64)(first + at) >> 8) + k / 8) * kLanes",
            "((u64)(first + at) >> 8) * kLanes",
            f"{KERNELS}/test_norms.py::{EQUAL}",
        ),
        (
            "a norm is of the span, not of the block",
            "if (k % kPerBlock == 0) {",
            "if (k == 0) {",
            f"{KERNELS}/test_norms.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/shared.py",
        (
            "shared integers are clipped a level early",
            "units = torch.where(units < levels, units, float(levels))",
            "units = torch.where(units < levels, units, float(levels - 1))",
            f"{KERNELS}/test_shared.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/affine.py",
        (
            "an affine level's zero is lost",
            "entries = (rows - zero.to(torch.float32)[:, None]) * scale[:, None]",
            "entries = rows * scale[:, None]",
            f"{KERNELS}/test_affine.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/bitmap.py",
        (
            "bits are the other way round",
            '_PLACES = torch.arange(8, dtype=torch.uint8, device="cpu")',
            "_PLACES = torch.arange(7, -1, -1).to(torch.uint8)",
            f"{KERNELS}/test_bitmap.py::{EQUAL}_and_undo_one_another",
        ),
    ),
    *planted(
        "kernels/random_k.py",
        (
            "what was taken is left, too",
            "        unsent.view(-1)[places] = 0.0\n",
            "        pass\n",
            f"{KERNELS}/test_random_k.py::{EQUAL}",
        ),
        (
            "what is put back is not weighted",
            "= values.flatten() * factor",
            "= values.flatten()",
            f"{KERNELS}/test_random_k.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/cast.py",
        (
            "random bits of a cast are not cut off",
            "cut = (magnitude + noise) & ~0xFFFF",
            "cut = magnitude + noise",
            f"{KERNELS}/test_scaled_cast.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/_low_rank_definition.py",
        (
            "a row is projected once",
            "for _ in range(2):\n                for q in done:",
            "for _ in range(1):\n                for q in done:",
            f"{KERNELS}/test_low_rank.py::test_orthonormal_for_any_condition",
        ),
        (
            "dead rows stay dead",
            "torch.where(dead, new, (rows / norms)",
            "torch.where(dead, rows, (rows / norms)",
            f"{KERNELS}/test_low_rank.py::test_unit_rows_replaces_rows_that_vanish",
        ),
    ),
]
