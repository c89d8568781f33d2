"""Runs programs as steps: the tests on the GPU, and compute-sanitizer over random calls."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from commhooks.kernels.runtime import nvrtc
from experiments.gpu_kernels.table import Setting, Step
from tests.kernels.fuzz import FAMILIES, family_name

__all__ = [
    "COLUMNS",
    "check_steps",
    "connect_steps",
    "has_shared_memory",
    "nccl_steps",
    "profile_steps",
    "sanitize_steps",
]

ROOT = Path(__file__).parents[2]
COLUMNS = ("result", "passed", "failed", "skipped")
ROUNDS = 10  # random calls per family under a sanitizer
LIMIT = 300.0  # seconds of a program
TWO_RANKS = "tests/device/test_two_ranks.py"
PROBE = "test_nccl_connects_two_ranks_on_one_gpu"
# On the GPU alone: neither the emulator nor instruction sets of the CPU; the latter in a rehearsal.
MACHINES = {"cuda": "gpu", "cpu": "guarded"}
# The allocator of torch serves tensors out of blocks of megabytes, in which no tool sees that an
# access is out of bounds, or what was not written.
NO_CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

# Kernels that are expected to be limited by instructions, and a case of ``share`` that runs each.
PROFILED = {
    "quantize_rotated": "Hadamard + int4 encode",
    "select": "top-k 1 %",
    "dequantize": "sign decode + sum of 8",
}


def check_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per file of tests; together they launch every kernel."""
    files = [path for path in sorted((ROOT / "tests/kernels").glob("test_*.py")) if _compares(path)]
    files += sorted((ROOT / "tests/device").glob("test_*.py"))
    for path in files:
        file = path.relative_to(ROOT).as_posix()
        if file != TWO_RANKS:  # has a part of its own: it may hang
            yield _tests(setting, path.stem, [file])


def _compares(path: Path) -> bool:
    """Whether tests launch kernels on this machine; others compile, or look at the host's side."""
    imported = re.search(r"^from tests\.kernels\.machines import (.*)$", path.read_text(), re.M)
    names = set(imported[1].split(", ")) if imported else set()
    return bool({"assert_agree", "machines"} & names) and path.stem != "test_machines"


def connect_steps(setting: Setting) -> Iterator[Step]:
    """Yields the test that two ranks on one GPU connect by NCCL, on which others depend."""
    yield _tests(setting, PROBE, [f"{TWO_RANKS}::{PROBE}"], limit=150.0)


def nccl_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per case of two ranks on one GPU: by Gloo alone where NCCL does not connect."""
    connected = True
    with suppress(OSError), (setting.out / "connect.csv").open(newline="") as file:
        connected = not any(row["error"] for row in csv.DictReader(file))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", TWO_RANKS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for case in re.findall(rf"^{TWO_RANKS}::(.*)$", listed.stdout, re.MULTILINE):
        if case != PROBE and (connected or "nccl" not in case):
            yield _tests(setting, case, [f"{TWO_RANKS}::{case}"], limit=150.0)


def _tests(setting: Setting, name: str, which: Sequence[str], limit: float = LIMIT) -> Step:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += [*which, "-o", f"timeout={limit:.0f}"]
    return Step(name, lambda: _run(setting, name, command, limit + 20))


def sanitize_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per tool and family of ops, the tools that find most first."""
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    for tool in ("racecheck", "memcheck", "initcheck"):
        for family in FAMILIES:
            # racecheck looks at shared memory only.
            if tool == "racecheck" and not any(map(has_shared_memory, family.KERNELS)):
                continue
            name = f"{tool} {family_name(family)}"
            command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable]
            command += ["-m", "tests.kernels.fuzz", "gpu", family_name(family)]
            variables = {"COMMHOOKS_FUZZ_ROUNDS": str(ROUNDS)}
            variables |= {} if tool == "racecheck" else NO_CACHING
            yield Step(name, lambda n=name, c=command, v=variables: _run(setting, n, c, LIMIT, v))


def profile_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per kernel that instructions are expected to limit: Nsight Compute's sections.

    The log of each has the unit that is busiest, occupancy, and what warps wait for.
    """
    profiler, folder = shutil.which("ncu") or "ncu", setting.out / "profiled"

    def profile(kernel: str, command: Sequence[str]) -> dict[str, Any]:
        shutil.rmtree(folder, ignore_errors=True)  # the program would not run a case that has a row
        return _run(setting, f"profile {kernel}", command, 120.0)

    for kernel, case in PROFILED.items():
        command = [profiler, "--kernel-name", f"regex:{kernel}", "--launch-skip", "3"]
        command += ["--launch-count", "1", "--section", "SpeedOfLight", "--section", "Occupancy"]
        command += ["--section", "WarpStateStats", "--section", "InstructionStats"]
        command += [sys.executable, "-m", "experiments.gpu_kernels", "--part", "share"]
        command += ["--only", f"{case}, 256 MiB", "--repeats", "3", "--out", str(folder)]
        yield Step(kernel, lambda k=kernel, c=command: profile(k, c))


def has_shared_memory(source: str) -> bool:
    """Whether a file of kernels, or a header that it includes, declares shared memory."""
    texts = [nvrtc.source_text(source)]
    texts += [
        (nvrtc._folder() / "include" / name).read_text()
        for name in re.findall(r'#include "include/(\w+\.h)"', texts[0])
    ]
    return any("__shared__" in text for text in texts)


def _run(
    setting: Setting,
    name: str,
    command: Sequence[str],
    limit: float,
    variables: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Runs a program, keeps what it prints, and returns its last line.

    Where it takes longer than ``limit``, or the study's time is over, it is ended with the
    processes that it has started, which would otherwise disturb what is timed afterwards.
    """
    setting.out.mkdir(parents=True, exist_ok=True)
    log = setting.out / f"log_{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}.txt"
    limit = min(limit, setting.ends - time.monotonic())
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ
            | {"COMMHOOKS_TEST_MACHINES": MACHINES[setting.device]}
            | (variables or {}),
            start_new_session=True,
        )
        ended = ""
        try:
            process.wait(max(limit, 0.0))
        except subprocess.TimeoutExpired:
            ended = f"ended after {limit:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing printed"]
    row: dict[str, Any] = {"result": lines[-1][:200]}
    for what in ("passed", "failed", "skipped"):
        match = re.search(rf"(\d+) {what}", lines[-1])
        row[what] = int(match[1]) if match else ""
    if ended or process.returncode:
        row["error"] = f"{ended or f'exit {process.returncode}'}, see {log.name}"
    return row
