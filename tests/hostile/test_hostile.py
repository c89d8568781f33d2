"""A few hundred hostile cases; ``python -m tests.hostile --cases 100000`` runs more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.hostile.cases import KINDS
from tests.hostile.runs import run
from tests.tools.harness import run_ranks


def _some(rank: int, world_size: int, folder: str) -> Any:
    outcome = run(range(400), Path(folder))
    return outcome.failures, set(outcome.counts)


def test_hostile_bytes_end_with_our_own_errors_soon_and_cheaply(tmp_path):
    ((failures, kinds),) = run_ranks(_some, 1, str(tmp_path), timeout=90, ignore_warnings=(".*",))
    assert failures == []
    assert kinds == set(KINDS)
