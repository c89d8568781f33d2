"""Tells about the machine code of every CUDA kernel what decides its speed; needs no GPU.

Run ``python -m experiments.cuda_kernels`` (2 minutes): NVRTC compiles every kernel, and a row says
how many registers it takes, what it spills, its shared memory, and how many threads of it a
multiprocessor holds. With nvdisasm (CUDA's, or ``pip install nvidia-cuda-nvdisasm``) the main loop
is counted as well: of the loops that access global memory and have no such loop inside, the one
with most accesses. ``instructions per access`` divides its instructions by its loads or stores,
whichever are more. It counts branches as if all were taken, so it is too large where a loop has
several ways, as with and without random bits; it is for comparing two versions of one kernel.

A simple model says what share of a copy's bandwidth to expect on an H200, where the bytes per entry
are known. ``share at most``: the bytes in flight, 128 for each load of the loop and warp, over the
26 KB per multiprocessor that 4.3 TB/s and 0.8 microseconds need. ``share at least``: this, or the
instructions that are issued while a copy moves the bytes of an entry (6.9 per lane and byte) over
those per access, if that is less.
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

from commhooks.kernels._blockwise_formats import FORMATS
from commhooks.kernels.runtime import cuda
from experiments.cuda_sass import Loop, find_nvdisasm, loops_of, main_loop, sass
from experiments.gpu_kernels.cubins import kernels

__all__ = ["describe", "expected_shares", "resident_threads"]

THREADS = 256  # of a block
REGISTERS, MOST_WARPS, MOST_SHARED = 65536, 64, 227 * 1024  # of a multiprocessor, sm_90
IN_FLIGHT = 26_000  # bytes per multiprocessor for a copy's speed: 4.3 TB/s, 0.8 us, 132 of them
PER_BYTE = 6.9  # instructions of a lane that are issued while a copy moves a byte


def resident_threads(registers: int, shared: int) -> int:
    """Returns how many threads of blocks of 256 a multiprocessor holds at once."""
    # Registers are given to a warp in portions of 256.
    per_warp = -(-registers * 32 // 256) * 256
    warps = min(MOST_WARPS, REGISTERS // max(per_warp, 1))
    blocks = warps // (THREADS // 32)
    if shared:
        blocks = min(blocks, MOST_SHARED // (shared + 1024))  # a block costs 1 KiB by itself
    return blocks * THREADS


def bytes_per_entry(name: str) -> float | None:
    """Returns what a kernel moves for an entry without a residual, where that is one number."""
    base, _, rest = name.partition("<")
    arguments = [part.strip() for part in rest.rstrip(">").split(",")]
    width = next((4.0 if one == "float" else 2.0 for one in arguments if one in _TYPES), 4.0)
    code = next((one.bits / 8 for one in FORMATS.values() if one.cpp == arguments[0]), None)
    known = {
        "hadamard": 8.0,
        "dct": 8.0,
        "finite": width,
        "multiply_right": width,
        "multiply_left": width,
        "expand": width,
        "largest_magnitudes": width,
        "collect": width,
        "pack_bits": 1.125,
        "unpack_bits": 1.125,
    }
    if code is not None and base.startswith(("quantize", "dequantize")):
        return width + code
    return known.get(base)


_TYPES = set(cuda.DTYPES.values())


def expected_shares(
    loop: Loop | None, threads: int, moved: float | None
) -> tuple[float, float] | tuple[None, None]:
    """Returns the model's least and largest share of a copy's bandwidth, where it applies."""
    if loop is None or moved is None:
        return None, None
    in_flight = min(1.0, threads / 32 * max(loop.loads, 1) * 128 / IN_FLIGHT)
    per_access = loop.instructions / max(loop.loads, loop.stores)
    return min(in_flight, PER_BYTE * moved / per_access), in_flight


def describe(file: str, name: str, architecture: str, nvdisasm: str | None) -> dict[str, Any]:
    """Compiles a kernel and returns its row."""
    cubin = cuda.compile_cubin(file, [name], architecture)

    def number(pattern: str) -> int:
        found = re.search(pattern, cubin.log)
        return int(found[1]) if found else 0

    registers, shared = number(r"Used (\d+) registers"), number(r"(\d+) bytes smem")
    threads = resident_threads(registers, shared)
    loop = None
    if nvdisasm is not None:
        loop = main_loop(loops_of(sass(nvdisasm, cubin.code), cubin.names[name]))
    accesses = max(loop.loads, loop.stores) if loop else None
    least, most = expected_shares(loop, threads, bytes_per_entry(name))
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
        "bytes per entry": bytes_per_entry(name),
        "share at least": least,
        "share at most": most,
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
    named = [(file, name) for file, names in kernels().items() for name in names if only in name]
    rows = []
    with Progress() as progress, ThreadPoolExecutor(2) as pool:
        for row in progress.track(
            pool.map(lambda one: describe(*one, architecture, program), named), total=len(named)
        ):
            rows.append(row)
    table = pd.DataFrame(rows)
    typer.echo(table.to_string(index=False, float_format="{:.2f}".format))
    out.parent.mkdir(parents=True, exist_ok=True)
    version = ".".join(map(str, cuda._nvrtc_version()))
    disassembler = "none" if program is None else Path(program).name
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
