"""Runs the CPU kernels of a 64-bit ARM, which qemu emulates, on tensors of this machine."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commhooks.kernels.runtime.cpu import SIGNATURES
from tests.builds import folder
from tests.emulator import runner

COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")

# Reads calls and does them: the function's number, buffers, arguments; writes the buffers back.
SERVER = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
typedef long long i64;
static i64 numbers[64];
static std::vector<char*> buffers;
static i64 whole(int i) { return numbers[i]; }
static float real(int i) { float x; memcpy(&x, numbers + i, 4); return x; }
static void* place(int i) { return numbers[i] < 0 ? nullptr : buffers[numbers[i]]; }
static i64 read_one() { i64 x; if (fread(&x, 8, 1, stdin) != 1) exit(0); return x; }
%s
int main() {
    while (true) {
        const i64 function = read_one(), count = read_one();
        std::vector<char*> owned(count);
        std::vector<i64> sizes(count);
        buffers.assign(count, nullptr);
        for (i64 b = 0; b < count; ++b) {
            const i64 address = read_one();
            sizes[b] = read_one();
            owned[b] = (char*)aligned_alloc(64, (sizes[b] + 191) / 64 * 64);
            buffers[b] = owned[b] + address %% 64;
            if (sizes[b] && fread(buffers[b], sizes[b], 1, stdin) != 1) exit(1);
        }
        const i64 arguments = read_one();
        for (i64 i = 0; i < arguments; ++i) numbers[i] = read_one();
        switch (function) {
%s
        }
        for (i64 b = 0; b < count; ++b) fwrite(buffers[b], sizes[b], 1, stdout), free(owned[b]);
        fflush(stdout);
    }
}
"""
_BYTE = torch.uint8
_TYPES = {"i": "i64", "f": "float", "p": "void*", "?": "void*"}
_READERS = {"i": "whole", "f": "real", "p": "place", "?": "place"}


def missing() -> str | None:
    """Names of the programs that are not installed."""
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} is not installed"
    return None if any(map(shutil.which, EMULATORS)) else "qemu-user is not installed"


def build() -> Path:
    """The program that does calls."""
    declared, cases = [], []
    for number, (name, kinds) in enumerate(SIGNATURES.items()):
        types = ", ".join(_TYPES[kind] for kind in kinds)
        values = ", ".join(f"{_READERS[kind]}({i})" for i, kind in enumerate(kinds))
        declared.append(f'extern "C" void {name}_base({types});')
        cases.append(f"        case {number}: {name}_base({values}); break;")
    file = folder() / "server.cpp"
    file.write_text(SERVER % ("\n".join(declared), "\n".join(cases)))
    program = file.with_suffix("")
    sources = [str(path) for path in sorted(runner.KERNELS.glob("*.cpp"))]
    command = [COMPILER, *FLAGS, "-DISA=base", "-static", str(file), *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    return program


class Server:
    """A process of the other machine; ``function`` takes the place of ``_cpu._function``."""

    def __init__(self) -> None:
        emulator = next(program for program in EMULATORS if shutil.which(program))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([emulator, str(build())], **pipes)  # type: ignore[call-overload]
        self._numbers = {name: number for number, name in enumerate(SIGNATURES)}

    def close(self) -> None:
        self._process.communicate(timeout=20)

    def function(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        # What lies in one place here does so there.
        buffers = {tensor.data_ptr(): tensor.view(-1).view(dtype=_BYTE) for tensor in tensors}
        places = list(buffers)
        message = [struct.pack("<qq", self._numbers[name], len(buffers))]
        for address, data in buffers.items():
            message += [struct.pack("<qq", address, data.numel()), data.numpy().tobytes()]
        message.append(struct.pack("<q", len(arguments)))
        for kind, value in zip(SIGNATURES[name], arguments, strict=True):
            if kind == "f":
                message.append(struct.pack("<fxxxx", value))
            elif kind == "i":
                message.append(struct.pack("<q", value))
            else:
                at = -1 if value is None else places.index(value.data_ptr())
                message.append(struct.pack("<q", at))
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        requests.write(b"".join(message))
        requests.flush()
        for data in buffers.values():
            answer = replies.read(data.numel())
            assert len(answer) == data.numel(), f"{name}: the process ended"
            data.numpy()[:] = memoryview(answer)
