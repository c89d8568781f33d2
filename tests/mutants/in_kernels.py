"""Bugs in the definitions of ops, which the kernels are compared with, and in CUDA kernels."""

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
            "the first cosine is too long",
            "    columns[:, 0] /= math.sqrt(2)\n",
            "",
            f"{KERNELS}/test_dct.py::test_it_is_the_cosine_transform",
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
    ),
    *planted(
        "kernels/scatter.py",
        (
            "added entries are not weighted",
            "total[places] += entries[:count] * factor",
            "total[places] += entries[:count]",
            f"{KERNELS}/test_scatter.py::test_payloads_are_added_in_order",
        ),
    ),
    *planted(
        "kernels/sparse.cu",
        (
            "too few candidates are taken for enough",
            "through < wanted) work.recount = 1;",
            "through < wanted) work.recount = 0;",
            f"{KERNELS}/test_sparse.py::test_a_sample_of_nothing_but_the_largest",
        ),
        (
            "those that reach the bound count twice",
            ": key < bound;",
            ": true;",
            f"{KERNELS}/test_sparse.py::test_a_sample_of_nothing_but_the_largest",
        ),
        (
            "full slots are not noticed",
            "if (lane() == 0 && count > tiles.room) tiles.work->overflow = 1;",
            "",
            f"{KERNELS}/test_sparse.py::test_data_on_which_a_sample_misleads",
        ),
        (
            "parts are taken from the end",
            "part = ticket % parts;",
            "part = parts - 1 - ticket % parts;",
            f"{KERNELS}/test_sparse.py::test_data_on_which_a_sample_misleads",
        ),
        (
            "padding is not written",
            "if (part == parts - 1 && threadIdx.x < padding) values[k + threadIdx.x] = 0.0f;",
            "",
            f"{KERNELS}/test_sparse.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/scatter.cu",
        (
            "payloads are added in any order",
            """                    }
                    __syncthreads();
""",
            "                    }\n",
            f"{KERNELS}/test_scatter.py::test_payloads_are_added_in_order",
        ),
        (
            "the last place of a range is left out",
            "(thread % 2 ? count : 0)",
            "(thread % 2 ? count - 1 : 0)",
            f"{KERNELS}/test_scatter.py::test_payloads_are_added_in_order",
        ),
        (
            "long payloads of a range are cut off",
            "thread + kThreads; i < bounds[2 * (p + a) + 1]",
            "thread + kThreads; i < bounds[2 * (p + a)]",
            f"{KERNELS}/test_scatter.py::test_payloads_are_added_in_order",
        ),
    ),
    *planted(
        "kernels/include/tickets.h",
        (
            "a stage does not wait for the one before",
            "while (seen(number) < least) __nanosleep(32);",
            "",
            f"{KERNELS}/test_resident_blocks.py::test_the_order_of_blocks_changes_nothing",
        ),
        (
            "a part that has not run counts as zero",
            "while ((sum = seen(sums + at)) < kOwn) __nanosleep(32);",
            "sum = seen(sums + at);",
            f"{KERNELS}/test_resident_blocks.py::test_the_order_of_blocks_changes_nothing",
        ),
        (
            "looking back goes beyond a complete sum",
            "!through || lane() < __ffs(through) ? sum & kSum : 0",
            "sum & kSum",
            f"{KERNELS}/test_sparse.py::test_data_on_which_a_sample_misleads",
        ),
        (
            "a complete sum lacks its own part",
            "kThrough | (before + own);",
            "kThrough | before;",
            f"{KERNELS}/test_sparse.py::test_data_on_which_a_sample_misleads",
        ),
        (
            "a part's own sum passes for the sum of all before",
            "(part ? kOwn : kThrough) | own",
            "kThrough | own",
            f"{KERNELS}/test_resident_blocks.py::test_the_order_of_blocks_changes_nothing",
        ),
        (
            "the first block to end a stage passes for the last",
            "== count - 1;",
            "== 0;",
            f"{KERNELS}/test_resident_blocks.py::test_the_order_of_blocks_changes_nothing",
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
            "= (values.flatten() * factor).to",
            "= values.flatten().to",
            f"{KERNELS}/test_random_k.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/random_k.cu",
        (
            "zeros are written over entries",
            "        __syncwarp();  // a lane writes an entry over another one's zero\n",
            "",
            f"{KERNELS}/test_random_k.py::{EQUAL}",
        ),
        (
            "a stratum is told by the one before",
            "begin_of(draw, at + s), begin_of(draw, at + s + 1)",
            "begin_of(draw, at + s - 1), begin_of(draw, at + s)",
            f"{KERNELS}/test_random_k.py::test_an_entry_that_is_not_finite_is_told_by_its_stratum",
        ),
        (
            "entries that are not finite and not drawn are ignored",
            "largest_of_warp(largest) < kInfinity;\n        __syncwarp();",
            "true;\n        __syncwarp();",
            f"{KERNELS}/test_random_k.py::test_an_entry_that_is_not_finite_is_told_by_its_stratum",
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
