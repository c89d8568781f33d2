"""Starts the processes that count what runs for one bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.house.bucket import on_fsdp2
from tests.house.source import ROOT
from tests.tools.harness import run_ranks

__all__ = ["COUNTS", "KEPT", "one_bucket"]

COUNTS = Path(__file__).with_name("counts.json")
KEPT = ("files", "calls", "modules")
# The first says which modules are imported: the others run in the same process.
_CASES = ("torch:int8", "torch:none", "torch:powersgd", "ddp_core:powersgd")


def one_bucket() -> dict[str, dict[str, Any]]:
    """Returns the counts by host and scheme."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.house.bucket", *_CASES]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    counts = json.loads(ran.stdout)
    counts["fsdp2:int8"] = run_ranks(on_fsdp2, 2)[0]  # in processes that have imported everything
    for case in [*_CASES[1:], "fsdp2:int8"]:
        for name in ("modules", "import_s"):
            del counts[case][name]
    return counts
