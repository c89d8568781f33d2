"""Starts the processes that count what runs for one bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.house.source import ROOT

__all__ = ["COUNTS", "KEPT", "one_bucket"]

COUNTS = Path(__file__).with_name("counts.json")
KEPT = ("files", "calls", "modules")
# Cases of one process, whose first says which modules are imported, and the number of ranks.
_PROCESSES = (
    (("torch:int8",), 1),
    (("torch:none", "torch:powersgd", "ddp_core:powersgd"), 1),
    (("fsdp2:int8",), 2),
)


def one_bucket() -> dict[str, dict[str, Any]]:
    """The counts by host and scheme."""
    found: dict[str, dict[str, Any]] = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for cases, world_size in _PROCESSES:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "tests.house.bucket", *cases,
                     str(rank), str(world_size), str(Path(folder, "store"))],
                    cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
                )
                for rank in range(world_size)
            ]  # fmt: skip
            texts = [rank.communicate(timeout=120)[0] for rank in ranks]
        found |= json.loads(texts[0])
    return found
