"""Runs programs as steps: the tests on the GPU, and compute-sanitizer over random calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commhooks.kernels.runtime import nvrtc
from experiments.gpu_kernels.table import Setting, Step
from tests.kernels.fuzz import FAMILIES, family_name

__all__ = ["COLUMNS", "check_steps", "has_shared_memory", "nccl_steps", "sanitize_steps"]

ROOT = Path(__file__).parents[2]
COLUMNS = ("result", "passed", "failed", "skipped")
ROUNDS = 10  # random calls per family under a sanitizer
LIMIT = 300.0  # seconds of a program
TWO_RANKS = "tests/device/test_two_ranks.py"
# On the GPU alone: neither the emulator nor instruction sets of the CPU.
ENVIRONMENT = {"COMMHOOKS_TEST_MACHINES": "gpu"}
# The allocator of torch serves tensors out of blocks of megabytes, in which no tool sees that an
# access is out of bounds, or what was not written.
NO_CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def check_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per file of tests; together they launch every kernel."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    # The others compile, or look at the host's side; test_machines tests the tests.
    files = [path for path in files if "import machines" in path.read_text()]
    files += sorted((ROOT / "tests" / "device").glob("test_*.py"))
    for path in files:
        file = path.relative_to(ROOT).as_posix()
        if file != TWO_RANKS:  # has a part of its own: it may hang
            yield _tests(setting, path.stem, [file])


def nccl_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per test of two NCCL ranks on one GPU, the probe for this first."""
    text = (ROOT / TWO_RANKS).read_text()
    for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE):
        yield _tests(setting, name, [f"{TWO_RANKS}::{name}"], limit=150.0)


def _tests(setting: Setting, name: str, which: Sequence[str], limit: float = LIMIT) -> Step:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += [*which, "-o", f"timeout={limit:.0f}"]
    return Step(name, lambda: _run(command, setting.out / "logs" / f"{name}.txt", limit + 20))


def sanitize_steps(setting: Setting) -> Iterator[Step]:
    """Yields a step per tool and family of ops."""
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    for tool in ("memcheck", "racecheck", "initcheck"):
        for family in FAMILIES:
            # racecheck looks at shared memory only.
            if tool == "racecheck" and not any(map(has_shared_memory, family.KERNELS)):
                continue
            name = f"{tool} {family_name(family)}"
            command = [sanitizer, "--tool", tool, "--max-error-exitcode", "1", sys.executable]
            command += ["-m", "tests.kernels.fuzz", "gpu", family_name(family)]
            more = {"COMMHOOKS_FUZZ_ROUNDS": str(ROUNDS)}
            more |= {} if tool == "racecheck" else NO_CACHING
            log = setting.out / "logs" / f"{name.replace(' ', '_')}.txt"
            yield Step(name, lambda c=command, log=log, more=more: _run(c, log, LIMIT, more))


def has_shared_memory(source: str) -> bool:
    """Whether a file of kernels, or a header that it includes, declares shared memory."""
    texts = [nvrtc.source_text(source)]
    texts += [
        (nvrtc._folder() / "include" / name).read_text()
        for name in re.findall(r'#include "include/(\w+\.h)"', texts[0])
    ]
    return any("__shared__" in text for text in texts)


def _run(
    command: Sequence[str], log: Path, limit: float, more: dict[str, str] | None = None
) -> dict[str, Any]:
    """Runs a program, keeps what it prints, and returns its last line; raises if it failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | (more or {}),
            timeout=limit,
            check=False,
        )
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing printed"]
    row: dict[str, Any] = {"result": lines[-1][:200]}
    for what in ("passed", "failed", "skipped"):
        match = re.search(rf"(\d+) {what}", lines[-1])
        row[what] = int(match[1]) if match else ""
    if done.returncode:
        row["error"] = f"exit {done.returncode}, see {log.name}"
    return row
