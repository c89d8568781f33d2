"""Hugging Face Accelerate: make test-frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frameworks.jobs import EXAMPLES, cases, job, needs
from tests.frameworks.resumed import check_resumed

pytestmark = [needs("accelerate"), pytest.mark.distributed, pytest.mark.timeout(1600)]
SCRIPT = "accelerate_cases.py"


def test_the_example_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for name, epochs in (("whole", 4), ("parts", 2), ("parts", 4)):
        (output, _) = job(EXAMPLES / "in_accelerate.py", tmp_path / name, "--epochs", epochs)
        assert "powersgd, " in output
    hooks = [
        torch.load(tmp_path / name / "epoch4" / "custom_checkpoint_0.pkl", weights_only=True)
        for name in ("whole", "parts")
    ]
    # 160 points in batches of 5 on 2 ranks, two batches a step, are 8 steps an epoch.
    check_resumed(*hooks, steps=32)
    optimizers = [
        torch.load(tmp_path / name / "epoch4" / "optimizer.bin", weights_only=True)
        for name in ("whole", "parts")
    ]
    check_resumed(*optimizers)
    weights = [
        (tmp_path / name / "epoch4" / "model.safetensors").read_bytes()
        for name in ("whole", "parts")
    ]
    assert weights[0] == weights[1]


def test_it_trains_as_without_a_hook_and_accumulates(tmp_path: Path) -> None:
    first, second = cases(SCRIPT, "trains", tmp_path)
    assert first["None"][0] == first["none"][0] != first["int8"][0]
    assert first["none"][1] == first["int8"][1] == 6  # not 12: half of the batches accumulate
    assert [first[s] for s in ("None", "none", "int8")] == [
        second[s] for s in ("None", "none", "int8")
    ]


def test_what_would_not_run_is_an_error(tmp_path: Path) -> None:
    for seen in cases(SCRIPT, "refuses", tmp_path):
        for given in ("of the enum", "a function"):
            assert "DistributedDataParallelKwargs(comm_hook=" in seen[given]
            assert "Leave it out" in seen[given]
        assert "after accelerator.prepare" in seen["not prepared"]


def test_a_script_runs_in_one_process(tmp_path: Path) -> None:
    (seen,) = cases(SCRIPT, "alone", tmp_path, ranks=0)
    assert (seen["said"], seen["metrics"]) == (1, {})
    assert 'Call CommHook("int8").attach(accelerator, model)' in seen["wrong"]


def test_a_checkpoint_that_every_node_keeps_is_whole_on_every_rank(tmp_path: Path) -> None:
    for seen in cases(SCRIPT, "copies", tmp_path):
        assert seen["parts"] == ["rank0", "rank1"]
        assert seen["same"]
