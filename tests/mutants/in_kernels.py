"""Bugs in the definitions of ops, which the kernels are compared with, and in CUDA kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

KERNELS = "tests/kernels"
EQUAL = "test_kernels_equal_the_definition"

MUTANTS: list[Mutant] = [
    *planted(
        "_dithered",
        (
            "a dither moves zeros",
            "taken = sums.abs() > d * 0.5 * d + 0.375",
            "taken = sums.abs() >= 0.5",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
    ),
    *planted(
        "_codes",
        (
            "integers are cut off",
            "return y.round().to(torch.int32) & (1 << form.bits) - 1",
            "return y.floor().to(torch.int32) & (1 << form.bits) - 1",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "zero is negative",
            "return (y < 0).to(torch.int32)",
            "return (y <= 0).to(torch.int32)",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
    ),
    *planted(
        "_mean_magnitude",
        (
            "a short block's mean magnitude is of a whole one",
            "return total * (torch.full_like(counts, block) / counts)",
            "return total",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
    ),
    *planted(
        "encode",
        (
            "a block that is not finite arrives as zeros",
            "torch.where(dead, 0.0, scale), torch.nan)",
            "torch.where(dead, 0.0, scale), 0.0)",
            f"{KERNELS}/test_blockwise.py::test_kernels_equal_the_definition",
        ),
    ),
    *planted(
        "kernels/include/blockwise_cuda.h",
        (
            "a warp that is ahead overwrites what its team still reads",
            "begin += warps() * SPAN, turn_of_team ^= 1)",
            "begin += warps() * SPAN)",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "the first warp of a team decides for its block",
            "        all.largest = larger(all.largest, largest[turn][first + i]);\n",
            "",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "what is not sent is not weighted",
            "            error *= unsent.weight;\n",
            "",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/blockwise.cu",
        (
            "all rows of a message have the noise of the first",
            "seed, stream, first + blockIdx.y * kRowKeys,\n",
            "seed, stream, first,\n",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "all rows of a message are decoded with the dither of the first",
            "seed, stream, first + blockIdx.y * kRowKeys, 0, dither_step",
            "seed, stream, first, 0, dither_step",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
        (
            "rows are decoded to the places of the first",
            "    out += row.entry;\n",
            "",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/rotated.cu",
        (
            "a short block is decoded from its own entries only",
            "(from, at, SPAN, 0, Dither{}, c)",
            "(from, at, entries_at<SPAN>(place), 0, Dither{}, c)",
            f"{KERNELS}/test_rotated.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/include/tail.h",
        (
            "a tail's residual is lost",
            "(residual ? residual[at] : -0.0f)",
            "-0.0f",
            f"{KERNELS}/test_tail.py::{EQUAL}",
        ),
        (
            "what is not sent of a tail is lost",
            "sent ? total[at] - sent[i] : 0.0f",
            "0.0f",
            f"{KERNELS}/test_tail.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/low_rank.cu",
        (
            "a rank's own left factor is not kept",
            "left[i] = all;\n        if (local_copy) local_copy[i] = all;",
            "left[i] = all;",
            f"{KERNELS}/test_low_rank.py::test_kernels_of_all_machines_agree_bit_for_bit",
        ),
        (
            "a rank's own right factor is not kept",
            "right[i] = all;\n        if (local_copy) local_copy[i] = all;",
            "right[i] = all;",
            f"{KERNELS}/test_low_rank.py::test_kernels_of_all_machines_agree_bit_for_bit",
        ),
        (
            "rows of a second slab add the residual again",
            "if (residual && !slab && there)",
            "if (residual && there)",
            f"{KERNELS}/test_low_rank.py::test_kernels_of_all_machines_agree_bit_for_bit",
        ),
    ),
    *planted(
        "kernels/orthonormal.cu",
        (
            "a row is subtracted without rounding in between",
            "entry = (double)rounded;",
            "",
            f"{KERNELS}/test_orthonormal.py::{EQUAL}",
        ),
        (
            "a row's second projection misses a group",
            "const i64 next = ends ? 0 : first + kRowGroup;",
            "const i64 next = 0;",
            f"{KERNELS}/test_orthonormal.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/restore.cu",
        (
            "a good step is taken back",
            "if (*good) return;",
            "",
            f"{KERNELS}/test_restore.py::{EQUAL}",
        ),
    ),
    *planted(
        "_ROUNDS",
        (
            "random bits have a round less",
            "_ROUNDS = 7  #",
            "_ROUNDS = 6  #",
            f"{KERNELS}/test_blockwise.py::test_philox_gives_the_known_answer",
        ),
    ),
    *planted(
        "centred",
        (
            "random numbers are never below a half",
            "return (2 * half_words - 65535).to(torch.float32)",
            "return (2 * half_words - 32768).to(torch.float32)",
            f"{KERNELS}/test_blockwise.py::{EQUAL}",
        ),
    ),
    *planted(
        "transform",
        (
            "the definition's rotation is not orthonormal",
            "rows = rows * torch.tensor(block**-0.5,",
            "rows = rows * torch.tensor(block**-0.49,",
            f"{KERNELS}/test_hadamard.py::{EQUAL}",
        ),
    ),
    *planted(
        "_four",
        (
            "the first cosine of a half is too long",
            "return torch.cat([a[:, :1] * root,",
            "return torch.cat([a[:, :1] * 2.0,",
            f"{KERNELS}/test_dct.py::{EQUAL}",
        ),
    ),
    *planted(
        "top_k_op",
        (
            "of equal magnitudes one is missing",
            "first = equal.cumsum(0) <= k - above.sum()",
            "first = equal.cumsum(0) > equal.sum() - (k - above.sum())",
            f"{KERNELS}/test_sparse.py::{EQUAL}",
        ),
    ),
    *planted(
        "scatter_sum_op",
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
        "quantize_levels_op",
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
        "_magnitudes_cuda",
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
        (
            "all rows of levels are written to the first",
            "u8* row = payload + b / per_row * bytes;",
            "u8* row = payload;",
            f"{KERNELS}/test_levels.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/hadamard.cu",
        (
            "all rows are rotated alike",
            "        rotation.first += blockIdx.y * kRowKeys;\n",
            "",
            f"{KERNELS}/test_hadamard.py::{EQUAL}",
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
        "squared_norms_op",
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
        "count_votes_op",
        (
            "a tie of votes is negative",
            ">= len(messages)",
            "> len(messages)",
            f"{KERNELS}/test_votes.py::{EQUAL}",
        ),
    ),
    *planted(
        "kernels/votes.cu",
        (
            "every row says whether the first row's entries are finite",
            "payload += blockIdx.y * bytes;",
            "",
            f"{KERNELS}/test_votes.py::{EQUAL}",
        ),
        (
            "half of an odd number of votes is enough",
            "2 * (i64)votes[k] >= count",
            "2 * (i64)votes[k] >= count - 1",
            f"{KERNELS}/test_votes.py::{EQUAL}",
        ),
    ),
    *planted(
        "quantize_norms_op",
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
        "quantize_shared_op",
        (
            "shared integers are clipped a level early",
            "units = torch.where(units < levels, units, float(levels))",
            "units = torch.where(units < levels, units, float(levels - 1))",
            f"{KERNELS}/test_shared.py::{EQUAL}",
        ),
    ),
    *planted(
        "dequantize_affine_op",
        (
            "an affine level's zero is lost",
            "entries = (rows - zero.to(torch.float32)[:, None]) * scale[:, None]",
            "entries = rows * scale[:, None]",
            f"{KERNELS}/test_affine.py::{EQUAL}",
        ),
    ),
    *planted(
        "gather_random_op",
        (
            "what was taken is left, too",
            "        unsent.view(-1)[places] = 0.0\n",
            "        pass\n",
            f"{KERNELS}/test_random_k.py::{EQUAL}",
        ),
    ),
    *planted(
        "scatter_random_op",
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
        "stochastic",
        (
            "random bits of a cast are not cut off",
            "cut = (magnitude + noise) & ~0xFFFF",
            "cut = magnitude + noise",
            f"{KERNELS}/test_scaled_cast.py::{EQUAL}",
        ),
    ),
    *planted(
        "orthonormalize_op",
        (
            "a row is projected once",
            "            for _ in range(2):\n                for first",
            "            for _ in range(1):\n                for first",
            f"{KERNELS}/test_orthonormal.py::test_orthonormal_for_any_condition",
        ),
    ),
    *planted(
        "unit_rows_op",
        (
            "dead rows stay dead",
            "torch.where(dead, run.right(fresh), rows",
            "torch.where(dead, rows, rows",
            f"{KERNELS}/test_orthonormal.py::test_unit_rows_replaces_rows_that_vanish",
        ),
    ),
    *planted(
        "expand_op",
        (
            "a product that is not finite is returned",
            "if finite is not None:\n            product",
            "if finite is None and finite is not None:\n            product",
            f"{KERNELS}/test_low_rank.py::test_a_flag_makes_matrices_nan",
        ),
    ),
]
