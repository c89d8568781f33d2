"""Runs kernels on random arguments; a program of its own, started under sanitizers.

``python -m tests.kernels.fuzz cpu`` or ``emulator``: the CPU kernels, or the CUDA ones on the
emulator, both compiled with the address and undefined-behaviour sanitizers. ``gpu``: the CUDA
kernels on a GPU, for compute-sanitizer. Names of families may follow; all are taken otherwise.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from commhooks.kernels.runtime import cpu
from tests.builds import folder
from tests.emulator import runner
from tests.kernels import hostile
from tests.kernels.machines import GpuRunner, Runner, functions_of

# Each has `fuzz`, one random call of every op, and `KERNELS`, the CUDA kernels it may launch.
FAMILIES = [
    importlib.import_module(f"tests.kernels.test_{name}")
    for name in [
        "affine",
        "blockwise",
        "dct",
        "fingerprint",
        "finite",
        "hadamard",
        "levels",
        "low_rank",
        "momentum",
        "norms",
        "orthonormal",
        "parts",
        "random_k",
        "restore",
        "rotated",
        "scaled_cast",
        "scatter",
        "shared",
        "sparse",
        "votes",
    ]
]
# Random calls for each family.
SEED, ROUNDS = 0, {"cpu": 40, "emulator": 12, "gpu": 40}
LESS = "COMMHOOKS_FUZZ_ROUNDS"  # another number: sanitizers of a GPU are slow
FLAGS = {
    "base": [],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4"],
}


def sanitized_library(instruction_set: str) -> ctypes.CDLL:
    """All CPU kernels, for one instruction set."""
    library = folder() / f"sanitized_{instruction_set}.so"
    sources = [str(path) for path in sorted(runner.KERNELS.glob("*.cpp"))]
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-w", "-shared"),
            *(*runner.SANITIZE, f"-DISA={instruction_set}", *FLAGS[instruction_set]),
            *(*sources, "-o", str(library)),
        ],
        check=True,
    )
    return ctypes.CDLL(str(library))


def family_name(family: Any) -> str:
    return str(family.__name__.rpartition(".test_")[2])


def fuzz(on: Runner, families: Sequence[Any], rounds: int) -> None:
    rng = random.Random(SEED)
    for family in families:
        for _ in range(rounds):
            family.fuzz(on, rng)


def main(machine: str, *names: str) -> None:
    torch.manual_seed(SEED)
    families = [family for family in FAMILIES if not names or family_name(family) in names]
    rounds = int(os.environ.get(LESS, ROUNDS[machine]))
    if machine == "cpu":
        best = cpu.instruction_set()
        with (
            mock.patch.object(cpu, "_library", return_value=sanitized_library(best)),
            mock.patch.object(cpu, "_function", functions_of(best)),
        ):
            fuzz(Runner("cpu"), families, rounds)
            if not names:
                assert not hostile.hostile()
    elif machine == "gpu":
        fuzz(GpuRunner("cuda"), families, rounds)
    else:
        kernels = {
            name: compiled for family in families for name, compiled in family.KERNELS.items()
        }
        with runner.emulated(kernels, flags=runner.SANITIZE):
            fuzz(Runner("cuda"), families, rounds)


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("done")
