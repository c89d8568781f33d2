"""The Trainer of Hugging Face Transformers: make test-frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.jobs import EXAMPLES, cases, job, needs
from tests.frameworks.resumed import check_resumed

pytestmark = [
    needs("transformers", "accelerate"),
    pytest.mark.distributed,
    pytest.mark.timeout(1600),
]
SCRIPT = "transformers_cases.py"


def test_the_example_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for name, steps in (("whole", 12), ("parts", 6), ("parts", 12)):
        (output, _) = job(EXAMPLES / "in_trainer.py", tmp_path / name, "--steps", steps)
        assert "powersgd, " in output
    hooks, optimizers, weights = [], [], []
    for name in ("whole", "parts"):
        folder = tmp_path / name / "checkpoint-12"
        (path,) = folder.glob("commhooks-*.pt")
        hooks.append(torch.load(path, weights_only=True))
        optimizers.append(torch.load(folder / "optimizer.pt", weights_only=True))
        weights.append((folder / "model.safetensors").read_bytes())
    check_resumed(*hooks, steps=12)
    check_resumed(*optimizers)
    assert weights[0] == weights[1]


def test_it_trains_as_without_a_hook_and_logs(tmp_path: Path) -> None:
    first, second = cases(SCRIPT, "trains", tmp_path)
    assert first["None"][0] == first["none"][0] != first["int8"][0]
    assert first["none"][1] == first["int8"][1] == 4  # not 8: half of the batches accumulate
    assert first["logged"] == [2, 4]
    names: list[Any] = ["None", "none", "int8"]
    assert [first[s] for s in names] == [second[s] for s in names]


def test_it_resumes_from_its_own_run_only(tmp_path: Path) -> None:
    for seen in cases(SCRIPT, "resumes", tmp_path):
        for error in (seen["another run"], seen["elsewhere"]):
            assert error.startswith("CheckpointError: commhooks.hosts.transformers.CommHook.load")
        assert seen["steps"] == [2, 4]
        assert seen["fresh"] == 2  # a checkpoint without a hook has no state of one


def test_a_script_runs_in_one_process_and_a_bare_callback_names_the_call(tmp_path: Path) -> None:
    (seen,) = cases(SCRIPT, "alone", tmp_path, ranks=0)
    assert seen["trained"] > 0
    assert 'CommHook("int8").attach(trainer)' in seen["bare"]
