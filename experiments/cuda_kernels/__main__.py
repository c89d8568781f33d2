"""Finds in the machine code of every CUDA kernel what decides its speed; needs no GPU.

Run ``python -m experiments.cuda_kernels`` (2 minutes): NVRTC compiles every kernel, and a row says
how many registers it takes, what it spills, its shared memory, and how many threads of it a
multiprocessor holds. With nvdisasm (CUDA's, or ``pip install nvidia-cuda-nvdisasm``) the main loop
is counted as well: of the loops that access global memory and have no such loop inside, the one
with most accesses. ``instructions per access`` divides its instructions by its loads or stores,
whichever are more. It counts branches as if all were taken, so it is too large where a loop has
several ways, as with and without random bits; it is for comparing two versions of one kernel.

``share`` is what a simple model expects of a copy's bandwidth on an H200, for kernels whose main
loop reads and writes every entry once. A turn of the loop takes a warp 0.8 microseconds for its
loads, and then 2 cycles per instruction, or more where the warps of a multiprocessor, which issues
4 instructions per cycle, take turns. The bytes of the turn of all its warps over that time, over
the 33 bytes per nanosecond that a multiprocessor moves in a copy (4.3 TB/s), is the share. As
branches count as taken, and the last round of a small grid does not, it can be wrong either way.
"""

from __future__ import annotations

import platform
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from rich.progress import Progress

from commhooks.kernels.runtime import nvrtc
from experiments.cuda_kernels.sass import Loop, find_nvdisasm, loops_of, main_loop, sass, version_of
from tests.kernels.fuzz import FAMILIES

__all__ = ["describe", "expected_share", "resident_threads"]

THREADS = 256  # of a block
REGISTERS, MAX_WARPS, MAX_SHARED = 65536, 64, 227 * 1024  # of a multiprocessor, sm_90
LATENCY, CLOCK, CYCLES = 0.8, 1755, 2  # microseconds; cycles of one; cycles per instruction
COPY = 4.3e6 / 132  # bytes that a multiprocessor moves in a microsecond
# Kernels whose main loop goes through entries; in others it goes through sums or factors.
STREAMING = {"quantize", "requantize", "dequantize", "quantize_rotated", "dequantize_rotated"}
STREAMING |= {"hadamard", "finite", "cast", "largest_magnitudes", "quantize_shared", "collect"}
STREAMING |= {"dequantize_shared", "quantize_levels", "dequantize_levels", "affine_extents"}
STREAMING |= {"affine_blocks", "affine_levels", "affine_entries", "count_reached", "squares"}
STREAMING |= {"encode_cosines", "decode_cosines"}
STREAMING |= {"quantize_norms", "quantize_parts", "dequantize_parts", "pack_votes", "count_votes"}


def resident_threads(registers: int, shared: int) -> int:
    """Returns how many threads of blocks of 256 a multiprocessor holds at once."""
    # Registers are given to a warp in portions of 256.
    per_warp = -(-registers * 32 // 256) * 256
    warps = min(MAX_WARPS, REGISTERS // max(per_warp, 1))
    blocks = warps // (THREADS // 32)
    if shared:
        blocks = min(blocks, MAX_SHARED // (shared + 1024))  # a block costs 1 KiB by itself
    return blocks * THREADS


def expected_share(loop: Loop, threads: int) -> float:
    """Returns the model's share of a copy's bandwidth."""
    warps = threads / 32
    turn = LATENCY + loop.instructions * max(CYCLES, warps / 4) / CLOCK
    return min(1.0, threads * (loop.loaded + loop.stored) / turn / COPY)


def describe(file: str, name: str, architecture: str, nvdisasm: str | None) -> dict[str, Any]:
    """Compiles a kernel and returns its row."""
    cubin = nvrtc.compile_cubin(file, [name], architecture)

    def number(pattern: str) -> int:
        match = re.search(pattern, cubin.log)
        return int(match[1]) if match else 0

    registers, shared = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
    threads = resident_threads(registers, shared)
    loop = None
    if nvdisasm is not None:
        loop = main_loop(loops_of(sass(nvdisasm, cubin.code), cubin.names[name]))
    accesses = max(loop.loads, loop.stores) if loop else None
    streams = loop is not None and name.partition("<")[0] in STREAMING
    return {
        "file": file,
        "kernel": name,
        "registers": registers,
        "spilled bytes": number(r"(\d+) bytes spill stores"),
        "shared bytes": shared,
        "threads per multiprocessor": threads,
        "code bytes": len(cubin.code),
        "loop instructions": loop.instructions if loop else None,
        "loop loads": loop.loads if loop else None,
        "loop stores": loop.stores if loop else None,
        "instructions per access": loop.instructions / accesses if loop and accesses else None,
        "loop bytes": loop.loaded + loop.stored if loop else None,
        "share": expected_share(loop, threads) if loop and streams else None,
    }


def main(
    architecture: Annotated[str, typer.Option(help="Such as 90 for sm_90.")] = "90",
    only: Annotated[str, typer.Option(help="Kernels whose name contains this.")] = "",
    nvdisasm: Annotated[str | None, typer.Option(help="The program; found if it can be.")] = None,
    out: Annotated[Path, typer.Option(help="The table.")] = Path("results/cuda_kernels.csv"),
) -> None:
    """Prints a row per kernel, and writes the table."""
    program = nvdisasm or find_nvdisasm()
    if program is None:
        typer.echo("nvdisasm is not installed: loops are not counted")
    named = [
        (file, name)
        for family in FAMILIES
        for file, names in family.KERNELS.items()
        for name in names
        if only in name
    ]
    rows = []
    with Progress() as progress, ThreadPoolExecutor(2) as pool:
        for row in progress.track(
            pool.map(lambda kernel: describe(*kernel, architecture, program), named),
            total=len(named),
        ):
            rows.append(row)
    table = pd.DataFrame(rows)
    typer.echo(table.to_string(index=False, float_format="{:.2f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    version = ".".join(map(str, nvrtc._nvrtc_version()))
    disassembler = "none" if program is None else version_of(program)
    with out.open("w") as file:
        file.write(
            f"# python -m experiments.cuda_kernels --architecture {architecture}; "
            f"{datetime.now(timezone.utc):%Y-%m-%d}; NVRTC {version}, nvdisasm {disassembler}, "
            f"torch {torch.__version__}, Python {platform.python_version()}\n"
        )
        table.to_csv(file, index=False, float_format="%.3g")
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
