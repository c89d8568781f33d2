"""Runs kernels on random arguments; a program of its own, started under sanitizers.

``python -m tests.kernels.fuzz cpu`` or ``cuda``: the CPU kernels, or the CUDA ones on the emulator,
both compiled with the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from typing import Any
from unittest import mock

import torch

from commhooks.kernels import _cpu, blockwise
from commhooks.kernels._blockwise_formats import FORMATS, payload_bytes
from tests.emulator import runner
from tests.kernels.machines import Runner, _for_set
from tests.kernels.test_blockwise import CPP

SEED, ROUNDS = 0, {"cpu": 400, "cuda": 120}
FLAGS = {
    "base": [],
    "v2": ["-march=x86-64-v2"],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4"],
}


def sanitized_library(instruction_set: str) -> ctypes.CDLL:
    """All CPU kernels, for one instruction set."""
    library = runner.folder() / f"sanitized_{instruction_set}.so"
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


def fuzz_blockwise(run: Any, rng: random.Random, blocks: list[int]) -> None:
    """One random call of every op, on buffers that end where they must."""
    format = rng.choice(list(FORMATS))
    block = rng.choice([b for b in blocks if b >= FORMATS[format].unit])
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
    run(blockwise.quantize_op, x, payload, format, block, kept, left, *key)
    if n:
        payloads = payload.repeat(rng.randrange(1, 5), 1)
        payloads[-1] = torch.randint_like(payload, 256)  # any bytes
        run(blockwise.dequantize_op, payloads, x, format, block, 0.5, rng.random() < 0.5)
        if block == 256:
            run(
                blockwise.requantize_op,
                *(payloads, payload, n, format, block, 0.5, kept, left, *key),
            )


def main(device_type: str) -> None:
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    if device_type == "cpu":
        best = _cpu.instruction_set()
        with (
            mock.patch.object(_cpu, "_library", return_value=sanitized_library(best)),
            mock.patch.object(_cpu, "function", _for_set(best)),
        ):
            for _ in range(ROUNDS[device_type]):
                fuzz_blockwise(Runner("cpu"), rng, [32, 64, 128, 256, 512, 2048])
    else:
        names = [
            *(f"quantize<{f.cpp}, {cpp}, 256>" for f in FORMATS.values() for cpp in CPP.values()),
            *(f"dequantize<{f.cpp}, {cpp}>" for f in FORMATS.values() for cpp in CPP.values()),
            *(f"requantize<{f.cpp}, 256>" for f in FORMATS.values()),
        ]
        with runner.emulated({"blockwise.cu": names}, flags=runner.SANITIZE):
            for _ in range(ROUNDS[device_type]):
                fuzz_blockwise(Runner("cuda"), rng, [256])


if __name__ == "__main__":
    main(sys.argv[1])
    print("done")
