"""Starts a script in two processes, with the environment that torchrun gives them."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

__all__ = ["EXAMPLES", "cases", "job", "needs"]

ROOT = Path(__file__).resolve().parents[2]  # packages are links in a job
EXAMPLES = ROOT / "docs" / "examples"


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a file's tests where a framework is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{' and '.join(missing)} not installed: make test-frameworks"
    )


def job(
    script: Path, *arguments: object, ranks: int = 2, timeout: float = 500.0, fails: bool = False
) -> list[str]:
    """Runs a script on every rank, and returns what each has printed.

    Args:
        ranks: 0 starts one process outside of any job.
        fails: whether a rank has to end with an error; otherwise none may.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "HF_HUB_OFFLINE": "1",
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # a busy machine
        "PYTHONPATH": os.pathsep.join([_packages(), *_others()]),
    }
    # Tests may run under torchrun, or in a shell that has set one of these.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    running = []
    for rank in range(max(ranks, 1)):
        of_rank = {} if ranks == 0 else {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=environment | of_rank, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        running.append(process)
    deadline, outputs = time.monotonic() + timeout, []
    try:
        for process in running:
            outputs.append(process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[0])
    finally:
        for process in running:
            process.kill()
            process.wait()
    codes = [process.returncode for process in running]
    assert any(codes) == fails, "\n".join([f"exit codes {codes}", *outputs])
    return outputs


@cache
def _packages() -> str:
    """Returns a folder with the packages, as they are installed.

    The root of the project has a folder ``kernels``, which Transformers would take for the package
    of that name.
    """
    folder = tempfile.mkdtemp(prefix="packages-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for package in ("commhooks", "ddp_core", "tests"):
        Path(folder, package).symlink_to(ROOT / package)
    return folder


def _others() -> list[str]:
    return [path for path in sys.path if path and Path(path).resolve() != ROOT]


def cases(script: str, name: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Runs one case of a script of this folder, and returns what each rank has reported."""
    outputs = job(Path(__file__).parent / script, name, folder, **options)
    ranks = max(options.get("ranks", 2), 1)
    reports = [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(ranks)]
    return [{**report, "output": output} for report, output in zip(reports, outputs, strict=True)]
