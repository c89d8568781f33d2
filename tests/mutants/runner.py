"""Plants one bug at a time in a copy of the project, and runs the test that has to find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant

__all__ = ["Outcome", "run_all"]

_PACKAGES = ("commhooks", "ddp_core", "kernels", "tests", "experiments")
_TIME_LIMIT = 600.0  # seconds
_SKIP = shutil.ignore_patterns("__pycache__", "*.pyc")


@dataclass(frozen=True)
class Outcome:
    """Verdict on a mutant.

    Attributes:
        verdict: "killed", "survived", "no end" in time, or "no test" where pytest found none.
        text: the end of what pytest said.
    """

    mutant: Mutant
    verdict: str
    seconds: float
    text: str

    @property
    def is_killed(self) -> bool:
        """Returns whether the test has found the bug."""
        return self.verdict == "killed"


def run_all(
    mutants: Sequence[Mutant], jobs: int, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Runs mutants side by side, and reports each as it ends."""
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_run, mutant) for mutant in mutants]
        outcomes = []
        for ended in as_completed(running):
            outcomes.append(ended.result())
            report(outcomes[-1])
    return outcomes


def _run(mutant: Mutant) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder, "source")
        copy.mkdir()
        for name in _PACKAGES:
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=_SKIP)
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, copy)
        file, source = mutant.planted_in(copy)
        (copy / file).write_text(source)
        begin = time.monotonic()
        code, text = _pytest(copy, mutant.test)
        verdict = {0: "survived", 1: "killed", None: "no end"}.get(code, "no test")
        if code is not None and code < 0:  # a kernel that writes anywhere ends the process
            verdict = "killed"
        return Outcome(mutant, verdict, time.monotonic() - begin, text)


def _pytest(copy: Path, test: str) -> tuple[int | None, str]:
    """The exit code, or None after the limit, and the end of the output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-o", "timeout=0"]  # a test out of time has found nothing
    command += ["-m", "not slow"]  # every bug is found by ``make test``
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            [*command, test], cwd=copy, env=environment, capture_output=True, text=True,
            timeout=_TIME_LIMIT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"no end within {_TIME_LIMIT:g} s"
    return done.returncode, "\n".join((done.stdout + done.stderr).splitlines()[-12:])
