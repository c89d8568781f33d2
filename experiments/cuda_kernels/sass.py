"""Reads machine code that nvdisasm prints: loops, and the accesses to memory in them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["Loop", "find_nvdisasm", "loops_of", "main_loop", "sass", "version_of"]

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)(.*)$")
_LABEL = re.compile(r"^(\.L_x_\d+|\$?[\w$]+):$")
_GLOBAL_LOAD, _GLOBAL_STORE = re.compile(r"^LDG?\b(?!C)"), re.compile(r"^STG?\b")
_IDLE = {"NOP"}


class Loop(NamedTuple):
    """Describes a loop of machine code: its instructions, and accesses to global memory.

    Attributes:
        begin, end: places of its first and last instruction.
        instructions: their number.
        loads, stores: numbers of accesses; a wide one counts as several of four bytes.
        loaded, stored: bytes of one lane in them.
    """

    begin: int
    end: int
    instructions: int
    loads: int
    stores: int
    loaded: int
    stored: int


def find_nvdisasm() -> str | None:
    """Returns the program's path: of an installed CUDA, or of a wheel that has it."""
    if program := shutil.which("nvdisasm"):
        return program
    patterns = ("nvidia/*/bin/nvdisasm", "triton/backends/nvidia/bin/nvdisasm")
    for folder in map(Path, sys.path):
        for pattern in patterns:
            for path in folder.glob(pattern):
                return str(path)
    return None


def version_of(program: str) -> str:
    """Returns the release that the program prints."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    match = re.search(r"release ([\d.]+)", done.stdout)
    return match[1] if match else "unknown"


def sass(program: str, cubin: bytes) -> str:
    """Returns the machine code of a cubin as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops_of(text: str, mangled: str) -> list[Loop]:
    """Returns the loops of a kernel; a call within one counts the instructions it runs."""
    functions = _functions(text)
    instructions, labels = functions[mangled]
    lengths = {name: _until_return(function[0]) for name, function in functions.items()}
    loops = []
    for place, (opcode, operands) in enumerate(instructions):
        target = re.search(r"`\((\.L_x_\d+)\)", operands)
        if not opcode.startswith("BRA") or target is None:
            continue
        begin = labels.get(target[1], place + 1)
        if begin > place or begin == place:  # forward, or the loop behind the end
            continue
        inside = [
            instruction
            for instruction in instructions[begin : place + 1]
            if instruction[0] not in _IDLE
        ]
        loads = [code for code, _ in inside if _GLOBAL_LOAD.match(code)]
        stores = [code for code, _ in inside if _GLOBAL_STORE.match(code)]
        called = [re.search(r"`\((\$?[\w$]+)\)", rest) for code, rest in inside if "CALL" in code]
        loops.append(
            Loop(
                begin,
                place,
                len(inside) + sum(lengths.get(target[1], 0) for target in called if target),
                sum(max(1, _width(code) // 4) for code in loads),
                sum(max(1, _width(code) // 4) for code in stores),
                sum(map(_width, loads)),
                sum(map(_width, stores)),
            )
        )
    return loops


def main_loop(loops: list[Loop]) -> Loop | None:
    """Returns the loop with most accesses among those without another one that has some."""
    busy = [loop for loop in loops if loop.loads + loop.stores]
    inner = [
        loop
        for loop in busy
        if not any(
            loop.begin <= other.begin and other.end <= loop.end and other is not loop
            for other in busy
        )
    ]
    return max(inner, key=lambda loop: loop.loads + loop.stores, default=None)


def _functions(text: str) -> dict[str, tuple[list[tuple[str, str]], dict[str, int]]]:
    """Returns instructions and labels by function."""
    functions: dict[str, tuple[list[tuple[str, str]], dict[str, int]]] = {}
    instructions: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            if label[1].startswith(".L"):
                labels[label[1]] = len(instructions)
            else:
                instructions, labels = [], {}
                functions[label[1]] = instructions, labels
        elif match := _INSTRUCTION.match(line):
            instructions.append((match[1], match[2]))
    return functions


def _until_return(instructions: list[tuple[str, str]]) -> int:
    for place, (opcode, _) in enumerate(instructions):
        if opcode.startswith("RET"):
            return place + 1
    return len(instructions)


def _width(opcode: str) -> int:
    """Returns the bytes that an access moves for a lane."""
    parts = opcode.split(".")
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return next((widths[part] for part in parts if part in widths), 4)
