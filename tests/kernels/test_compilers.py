"""Kernels are the same by other compilers, and on processors without the instructions of x86."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.kernels.runtime import cpu
from commhooks.kernels.runtime.op import Op
from tests.builds import folder
from tests.emulator.runner import KERNELS
from tests.kernels import aarch64, test_hadamard, test_low_rank
from tests.kernels.fuzz import FAMILIES, FLAGS, family_name
from tests.kernels.inputs import same
from tests.kernels.machines import Runner

CLANG = shutil.which("clang++")
needs_clang = pytest.mark.skipif(CLANG is None, reason="clang++ is not installed")
STRICT = ("-std=c++17", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-fPIC")
SOURCES = sorted(KERNELS.glob("*.cpp"))


def flags_here() -> list[str]:
    isa = cpu.instruction_set()
    return [f"-DISA={isa}", *FLAGS[isa]]


def test_the_words_that_compilers_do_not_share_are_in_one_place():
    for word, others in (("__builtin_shuffle(", "__clang__"), ("__builtin_shufflevector(", "else")):
        sources = [path for path in KERNELS.rglob("*") if path.suffix in (".h", ".cpp")]
        files = [path for path in sources if word in path.read_text()]
        assert [path.name for path in files] == ["vector.h"]
        assert f"#if defined({others})" in files[0].read_text() or others == "else"
    for path in [*SOURCES, *KERNELS.glob("include/*.h")]:
        assert '__builtin_cpu_supports("x86-64' not in path.read_text()  # gcc 12 and later only


@needs_clang
def test_clang_takes_every_file():
    running = [
        subprocess.Popen(
            [str(CLANG), *STRICT, *flags_here(), "-Wall", "-Werror", "-fsyntax-only", str(path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for path in SOURCES
    ]
    errors = [process.communicate(timeout=100)[1] for process in running]
    assert not any(process.returncode for process in running), "\n".join(errors)


@needs_clang
def test_clang_shuffles_as_gcc_does():
    """The files of which each compiler has a wording of its own."""
    library = folder() / "clang.so"
    files = [str(KERNELS / name) for name in ("hadamard.cpp", "low_rank.cpp")]
    command = [str(CLANG), *STRICT, *flags_here(), "-O1", "-shared", *files, "-o", str(library)]
    subprocess.run(command, check=True, timeout=100)
    loaded = ctypes.CDLL(str(library))

    def function(name: str) -> Any:
        return cpu.function_of(loaded, name, cpu.instruction_set())

    for family in (test_hadamard, test_low_rank):
        compare(family, function, rounds=25)


def compare(family: Any, function: Any, rounds: int) -> None:
    """Random calls: what other functions write is, bit for bit, what the library writes."""

    class Both(Runner):
        def __call__(self, op: Op, *args: Any) -> None:
            # One tensor that is given twice stays one.
            copies = {
                id(argument): argument.clone()
                for argument in args
                if isinstance(argument, torch.Tensor)
            }
            super().__call__(op, *(copies.get(id(argument), argument) for argument in args))
            with mock.patch.object(cpu, "_function", function):
                super().__call__(op, *args)
            for argument in args:
                assert not isinstance(argument, torch.Tensor) or same(
                    argument, copies[id(argument)]
                ), op.name

    torch.manual_seed(0)
    rng = random.Random(0)
    for _ in range(rounds):
        family.fuzz(Both("cpu"), rng)


@cache
def server() -> aarch64.Server:
    return aarch64.Server()


@pytest.mark.timeout(400)
@pytest.mark.skipif(
    os.environ.get("COMMHOOKS_TEST_AARCH64") != "1",
    reason="takes two minutes: COMMHOOKS_TEST_AARCH64=1 asks for it",
)
@pytest.mark.skipif(aarch64.missing() is not None, reason=str(aarch64.missing()))
@pytest.mark.parametrize("family", FAMILIES, ids=family_name)
def test_arm_has_the_bits_of_x86(family):
    compare(family, server().function, rounds=30)


def test_this_machine_has_the_instruction_set_that_it_says():
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        pytest.skip("not Linux on x86-64")
    names = Path("/proc/cpuinfo").read_text()
    best = "v4" if "avx512vl" in names else "v3" if "avx2" in names and "fma" in names else None
    assert cpu._best() == (-1 if best is None else cpu.INSTRUCTION_SETS.index(best))


def test_the_library_of_a_tree_has_the_instruction_sets_of_its_machine():
    library = cpu._library()
    if library is None or platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists():
        pytest.skip("not Linux on x86-64 with CPU kernels")
    assert hasattr(library, "quantize_v3")
    assert hasattr(library, "quantize_v4") == ("avx512vl" in Path("/proc/cpuinfo").read_text())
