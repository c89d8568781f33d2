"""Threads of a CUDA block do not race, and every barrier of the kernels is needed for that.

ThreadSanitizer watches threads of the host run the kernels, as they are and without one barrier at
a time: it reports accesses that no barrier orders, also where the result is right.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from commhooks.kernels import Matrices, Tiles, affine, blockwise, payload_bytes, philox
from commhooks.kernels.blockwise import segments_for
from commhooks.kernels.low_rank import expand_op, multiply_left_op
from commhooks.kernels.orthonormal import orthonormalize_op
from commhooks.kernels.runtime import cuda, nvrtc
from tests.emulator import runner
from tests.kernels import test_dct, test_parts, test_random_k, test_scatter, test_sparse
from tests.kernels.inputs import plain
from tests.kernels.machines import Runner

# A barrier behind a fence orders blocks, of which one runs at a time here; see
# tests/kernels/test_fences.py.
BARRIER = re.compile(r"(__threadfence\(\);[\s}]*)?__sync(threads|warp)\(\);")
RACE = 66  # ThreadSanitizer's exit code
TICKETS = nvrtc.add_source(
    "tickets (inline)",
    """
#include "include/tickets.h"
__global__ void tickets(u32* counter, u64* sums, u64* out) {
    out += threadIdx.x;
    for (u32 ticket; (ticket = next_ticket(counter)) < 3;) out[ticket * 256] = ticket;
    u64 end;
    for (i64 part = 0; part < 3; ++part) out[part * 256] += counts_before(sums, part, 1, end) + end;
    for (u32 i = 0; i < 3; ++i) out[i * 256] += is_last(counter, 5);
}
""",
)


class Case(NamedTuple):
    """A call of ops that passes every barrier of some files, most of them more than once.

    Attributes:
        kernels: of ``source``, which are launched.
        headers: the other files.
    """

    source: str
    kernels: tuple[str, ...]
    call: Callable[[Any], object]
    headers: tuple[str, ...] = ()


def affine_of_long_blocks(run: Any) -> None:
    block, blocks = 65 * 2048, 2
    x = plain(block * blocks)
    levels, zero = torch.zeros(len(x)).byte(), torch.zeros(blocks).byte()
    scale = torch.zeros(blocks)
    run(affine.quantize_affine_op, x, levels, scale, zero, block)


def blocks_of_teams(run: Any) -> None:
    x, kept, left = plain(20_000), plain(20_000, seed=1), torch.zeros(20_000)
    segments = segments_for("int8", 2048, [[len(x)]])
    payload = torch.zeros(payload_bytes(segments, "int8", 2048), dtype=torch.uint8)
    form = ("int8", 2048, segments.table, -1)
    run(blockwise.quantize_op, x, payload, *form, kept, left, *philox.NO_STREAM, 0, 1)
    run(blockwise.dequantize_op, payload[None], x, *form, 1.0, False, *philox.NO_STREAM)


def two_ranks(run: Any) -> None:
    matrices = Matrices([(0, 2000, 3, 2)])
    left = plain(matrices.left_numel)
    run(orthonormalize_op, left, torch.empty_like(left), matrices.table)


def products(run: Any) -> None:
    matrices = Matrices([(0, 100, 600, 6)])  # several tasks of a warp, and two slabs
    x, left, right = plain(60_000), plain(matrices.left_numel), plain(matrices.right_numel)
    tail = (None, None, None)
    run(multiply_left_op, x, None, None, matrices.table, left, right, *tail)
    run(expand_op, left, right, matrices.table, x, *tail)


def many_tickets(run: Any) -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    sums, out = torch.zeros(2, 768, dtype=torch.int64)
    cuda.launch(TICKETS, "tickets", out.device, 8, (counter, sums, out))


def tiles_of_both_kinds(run: Any) -> None:
    tiles = Tiles([(64, 128), (1, 5000)])
    x, old = plain(tiles.numel), plain(tiles.numel, seed=1)
    test_dct.outputs(run, x, old, tiles, 70)  # more than a block has threads


def sums_of_payloads(run: Any) -> None:
    n = 9000  # two ranges, and more payloads than a block looks up at once
    run(test_scatter.scatter_sum_op, *test_scatter.payloads(130, n, 99), torch.empty(n), 0.5, None)


CASES = {
    "affine": Case(
        "affine.cu",
        ("affine_extents<float>", "affine_scales<8>", "affine_levels<float>"),
        affine_of_long_blocks,
    ),
    "blockwise": Case(
        "blockwise.cu",
        ("quantize<Int8, float, 2048>", "dequantize<Int8, float>"),
        blocks_of_teams,
        ("include/blockwise_cuda.h",),
    ),
    "dct": Case(
        "dct.cu",
        ("encode_cosines<float>", "decode_cosines<float>"),
        tiles_of_both_kinds,
    ),
    "low_rank": Case(
        "low_rank.cu", ("multiply_left<float>", "add_chunks<float>", "expand<float>"), products
    ),
    "orthonormal": Case("orthonormal.cu", ("orthonormalize",), two_ranks),
    "parts": Case(
        "parts.cu",
        ("quantize_parts", "dequantize_parts", "squared_norms", "squares<float>"),
        lambda run: test_parts.outputs(run, plain(9300), (5000, 300, 4000)),
    ),
    "random_k": Case(
        "random_k.cu",
        ("gather_random<float>", "scatter_random<float>"),
        lambda run: test_random_k.outputs(run, plain(3000), 70),
    ),
    "scatter": Case("scatter.cu", ("scatter_sum<float>",), sums_of_payloads),
    "sparse": Case(
        "sparse.cu",
        ("select<float>", "take<float>", "sample<float, 2048, true>", "sample<float, 8192, false>"),
        lambda run: test_sparse.outputs(run, plain(50_000), 500, residual=True, left=True),
    ),
    "tickets": Case(TICKETS, ("tickets",), many_tickets, ("include/tickets.h",)),
}


def barriers(*files: str) -> list[str]:
    """The places of barriers, as "file:line"."""
    places = []
    for file in files:
        text = nvrtc.source_text(file)
        for match in BARRIER.finditer(text):
            if not match[1]:
                places.append(f"{Path(file).name}:{text.count(chr(10), 0, match.start()) + 1}")
    return places


def test_every_barrier_is_in_some_case() -> None:
    paths = [path for path in runner.KERNELS.rglob("*") if path.suffix in (".cu", ".h", ".cpp")]
    files = [path.relative_to(runner.KERNELS) for path in paths]
    cases = [file for case in CASES.values() for file in (case.source, *case.headers)]
    assert sorted(barriers(*map(str, files))) == sorted(barriers(*cases))


@cache
def libtsan() -> str:
    """The file of ThreadSanitizer; skips the test if it does not run here."""
    library = subprocess.check_output(["g++", "-print-file-name=libtsan.so"], text=True).strip()
    if not os.path.isabs(library):
        pytest.skip("g++ has no libtsan")
    if (
        not shutil.which("setarch")
        or subprocess.run(["setarch", "-R", "true"], check=False).returncode
    ):
        pytest.skip("no setarch that turns off random addresses, with which libtsan does not start")
    return library


def run_case(name: str) -> None:
    """Runs a case as it is and without each of its barriers; for the program below."""
    case = CASES[name]
    library = runner.build(runner.file_of(case.source), case.kernels, runner.THREADS)
    for place in ("none", *barriers(case.source, *case.headers)):
        sys.stdout.flush()
        if not (child := os.fork()):
            signal.alarm(100)  # without a barrier, threads may wait for one another for ever
            library.emulator_skip(place.encode())
            with runner.emulated({case.source: case.kernels}, 0, runner.THREADS, blocks=1):
                case.call(Runner("cuda"))
            os._exit(0)
        print(place, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_threads_race_only_without_a_barrier(name: str) -> None:
    library, case = libtsan(), CASES[name]
    runner.compiled(runner.file_of(case.source), case.kernels, runner.THREADS)
    program = f"from tests.emulator.test_races import run_case; run_case({name!r})"
    done = subprocess.run(
        ["setarch", "-R", sys.executable, "-c", program],
        env=os.environ
        | {"LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}
        | {"TSAN_OPTIONS": f"halt_on_error=1:exitcode={RACE}:die_after_fork=0:handle_segv=0"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        cwd=runner.HERE.parents[1],
    )
    codes = dict(line.split() for line in done.stdout.splitlines())
    expected = dict.fromkeys(barriers(case.source, *case.headers), str(RACE))
    assert codes == {"none": "0", **expected}, done.stderr[-8000:]
