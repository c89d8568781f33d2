"""Compiles ``.cu`` files with g++ and the emulator, and launches as ``cuda.launch`` does."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from commhooks.kernels.runtime import cuda, nvrtc
from commhooks.kernels.runtime.arguments import as_ctypes
from tests.builds import built

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
# Fewer blocks than work, so that every loop over the grid takes more than one turn.
MAX_BLOCKS = 3
# Several blocks at once, in turns that a seed decides.
RESIDENT = ("-DRESIDENT=4", "-pthread")
# Threads of the host in place of fibers, and what reports their races.
THREADS = ("-DTHREADS", "-pthread", "-g", "-fsanitize=thread")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


class EmulatedError(RuntimeError):
    """A kernel did not end well: it diverged, deadlocked or touched other memory, or is unknown."""


@cache
def file_of(source: str) -> Path:
    """The file of kernels; text that lies in none is written to one."""
    path = KERNELS / source
    if path.exists():
        return path
    text = nvrtc.source_text(source)
    return built(f"{source.split()[0]}-{_hash(text)}.cu", lambda path: path.write_text(text))


def _hash(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode()).hexdigest()[:16]


def build(source: Path, names: Sequence[str], flags: Sequence[str] = ()) -> ctypes.CDLL:
    """A library with those kernels of the file."""
    return _loaded(source, tuple(names), tuple(flags))


@cache
def _loaded(source: Path, names: tuple[str, ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(compiled(source, names, flags)))
    loaded.emulator_error.restype = ctypes.c_char_p
    return loaded


def compiled(source: Path, names: Sequence[str], flags: Sequence[str] = ()) -> Path:
    """The file of the library that ``build`` loads."""
    table = "\n".join(
        f'    if (!strcmp(name, "{name}"))'
        f" return emulator::launch({name}, arguments, *grid, *block);"
        for name in names
    )
    text = f"""#include "{HERE}/cuda_emulator.h"
#include "{source}"
extern "C" int emulator_launch(const char* name, const dim3* grid, const dim3* block,
                               void** arguments) {{
{table}
    emulator::error = "no such kernel";
    return 2;
}}
extern "C" const char* emulator_error() {{ return emulator::error.c_str(); }}
extern "C" void emulator_order(unsigned order) {{ emulator::lane_order = order & 31; }}
extern "C" void emulator_ends(int only) {{ emulator::ends_only = only; }}
extern "C" void emulator_seed(unsigned seed) {{ emulator::seed = seed; }}
#if defined(THREADS)
extern "C" void emulator_skip(const char* place) {{ emulator::skipped = place; }}
#endif
"""

    def compile_to(library: Path) -> None:
        file = library.with_suffix(".cpp")
        file.write_text(text)
        command = [
            *("g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-w"),
            # Two libraries in one process may have shared memory of the same name.
            *("-fno-gnu-unique", "-shared", f"-I{KERNELS}", *flags, str(file), "-o", str(library)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{source.name} does not compile for the emulator:\n{done.stderr}")

    key = _hash(text, source.read_text(), *flags)
    return built(f"{source.stem}-{key}.so", compile_to)


def launch_on(
    library: ctypes.CDLL,
    name: str,
    blocks: tuple[int, int],
    threads: int,
    arguments: Sequence[Any],
) -> None:
    """Raises EmulatedError if the kernel did not end well."""
    pointers = (ctypes.c_void_p * len(arguments))(
        *(ctypes.cast(ctypes.byref(argument), ctypes.c_void_p) for argument in arguments)
    )
    grid, block = (ctypes.c_uint * 3)(*blocks, 1), (ctypes.c_uint * 3)(threads, 1, 1)
    if library.emulator_launch(name.encode(), grid, block, pointers):
        raise EmulatedError(f"{name}: {library.emulator_error().decode()}")


@contextmanager
def emulated(
    names: dict[str, Sequence[str]],
    order: int = 0,
    flags: Sequence[str] = (),
    *,
    blocks: int = MAX_BLOCKS,
    seed: int = 0,
    ends: bool = False,
) -> Iterator[None]:
    """Within it, ``cuda.launch`` runs kernels on tensors of the CPU, lanes in that order.

    Args:
        names: the kernels that may be launched, by file; they are compiled together.
        flags: of g++.
        blocks: of a grid, at most.
        seed: of the turns of blocks, where several are resident; see ``RESIDENT``.
        ends: a grid has all blocks that have work, of which the first and the last few run.
    """

    def launch(
        source: str,
        name: str,
        device: torch.device,
        work: int,
        arguments: Sequence[Any],
        rows: int = 1,
        *,
        threads: int = 256,
    ) -> None:
        library = build(file_of(source), names[source], flags)
        library.emulator_order(order)
        library.emulator_seed(seed)
        library.emulator_ends(ends)
        values = [as_ctypes(argument) for argument in arguments]
        work_blocks = -(-work * 32 // threads) or 1  # as `cuda.grid_for`
        grid = (work_blocks if ends else min(work_blocks, blocks), rows)
        launch_on(library, name, grid, threads, values)

    with mock.patch.object(cuda, "launch", launch):
        yield
