"""Runs a script in two ranks as ``commhooks headroom`` does, without starting Python anew.

The ranks are forked from the harness's server: a start of torch takes longer than the steps.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commhooks.predict._headroom_agent import ORDER
from tests.tools import harness

HOSTS = Path(__file__).parents[1] / "predict" / "scripts"


@dataclass(frozen=True)
class Ran:
    """Outcome of a script.

    Attributes:
        codes: exit codes of the ranks; None for one that did not end in time.
        output: of each rank.
        report: what the script's processes left for the command.
    """

    codes: tuple[int | None, ...]
    output: tuple[str, ...]
    report: dict[str, Any]


def run_script(
    folder: Path,
    name: str,
    *arguments: object,
    time_limit: float = 600.0,
    status: Path | None = None,
    timeout: float = 60.0,
) -> Ran:
    """Runs a script of tests/predict/scripts in two ranks, with ten steps of each kind."""
    harness._start_server()
    status = status or folder / "status.json"
    order = {"steps": 10, "deadline": time.time() + time_limit, "out": None, "status": str(status)}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    argv = [str(HOSTS / name), *map(str, arguments)]
    ranks = []
    for rank in range(2):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), ORDER: json.dumps(order),
        }  # fmt: skip
        log = folder / f"rank{rank}"
        ranks.append(harness._context.Process(target=_rank, args=(argv, environment, str(log))))
        ranks[-1].start()
    try:
        end = time.monotonic() + timeout
        for rank in ranks:
            rank.join(max(end - time.monotonic(), 0.0))
        codes = tuple(rank.exitcode for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    report = json.loads(status.read_text()) if status.exists() else {}
    return Ran(codes, tuple((folder / f"rank{rank}").read_text() for rank in range(2)), report)


def _rank(argv: list[str], environment: dict[str, str], log: str) -> None:
    from commhooks.cli.site import sitecustomize

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    sys.argv = argv
    for module, watched in sitecustomize._WATCHED.items():
        if module in sys.modules:
            sitecustomize._wrap(sys.modules[module], *watched)
    code: Any = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
