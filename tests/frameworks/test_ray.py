"""Ray Train: make test-frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.jobs import EXAMPLES, cases, job, needs
from tests.frameworks.resumed import check_resumed

pytestmark = [needs("ray"), pytest.mark.distributed, pytest.mark.timeout(1600)]


def latest(folder: Path, run: str = "example") -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's file and the hook's in the last checkpoint."""
    latest = max((folder / run).glob("checkpoint_*[0-9]"))
    (model, hook) = (
        torch.load(latest / name, weights_only=True) for name in ("model.pt", "commhooks_state.pt")
    )
    return model, hook


def test_the_example_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for name, epochs in (("whole", 4), ("parts", 2), ("parts", 4)):
        (output,) = job(EXAMPLES / "in_ray.py", tmp_path / name, "--epochs", epochs, ranks=0)
        assert f"epoch {epochs - 1}, checkpoint" in output
    (whole, hook), (parts, other) = latest(tmp_path / "whole"), latest(tmp_path / "parts")
    check_resumed(whole, parts)
    check_resumed(hook, other, steps=32)


def test_a_worker_that_dies_is_restarted_and_the_end_is_the_same(tmp_path: Path) -> None:
    (seen,) = cases("ray_cases.py", "dies", tmp_path, ranks=0)
    assert (seen["died"], seen["epoch"]) == (True, 3)
    job(EXAMPLES / "in_ray.py", tmp_path, "--epochs", 4, ranks=0)
    (whole, hook), (parts, other) = latest(tmp_path), latest(tmp_path, "dies")
    check_resumed(whole, parts)
    check_resumed(hook, other, steps=32)
