"""Lightning Fabric: make test-frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frameworks.jobs import EXAMPLES, cases, job, needs
from tests.frameworks.resumed import check_resumed

pytestmark = [needs("lightning"), pytest.mark.distributed, pytest.mark.timeout(1600)]
SCRIPT = "fabric_cases.py"


def test_the_example_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for name, epochs in (("whole", 4), ("parts", 2), ("parts", 4)):
        (output, _) = job(EXAMPLES / "in_fabric.py", tmp_path / name, "--epochs", epochs)
        assert "powersgd, " in output
    whole = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=True)
    parts = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=True)
    check_resumed(whole, parts)
    check_resumed(whole["comm"], parts["comm"], steps=32)


def test_it_trains_as_without_a_hook_and_accumulates(tmp_path: Path) -> None:
    first, second = cases(SCRIPT, "trains", tmp_path)
    assert first["None"][0] == first["none"][0] != first["int8"][0]
    assert first["none"][1] == first["int8"][1] == 6  # not 12: half of the batches accumulate
    assert [first[s] for s in ("None", "none", "int8")] == [
        second[s] for s in ("None", "none", "int8")
    ]


def test_a_checkpoint_of_two_ranks_is_loaded_by_three(tmp_path: Path) -> None:
    saved = cases(SCRIPT, "saves", tmp_path)
    loaded = cases(SCRIPT, "loads", tmp_path, ranks=3)
    assert {values["step"] for values in (*saved, *loaded)} == {4}
    before, after = (
        torch.tensor([values["residual"] for values in ranks]).mean(0) for ranks in (saved, loaded)
    )
    assert before.any()
    torch.testing.assert_close(after, before)


def test_what_would_not_run_is_an_error(tmp_path: Path) -> None:
    for seen in cases(SCRIPT, "refuses", tmp_path):
        assert "after fabric.setup" in seen["not set up"]
    (seen,) = cases(SCRIPT, "alone", tmp_path, ranks=0)
    assert seen["step"] == 0
