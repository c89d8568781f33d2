"""Lightning's Trainer with DDPStrategy: make test-frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.jobs import EXAMPLES, cases, job, needs
from tests.frameworks.resumed import check_resumed

pytestmark = [needs("lightning"), pytest.mark.distributed, pytest.mark.timeout(1600)]
SCRIPT = "lightning_cases.py"


def last(folder: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return saved


def test_the_example_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for name, epochs in (("whole", 4), ("parts", 2), ("parts", 4)):
        (output, _) = job(EXAMPLES / "in_lightning.py", tmp_path / name, "--epochs", epochs)
        assert "powersgd, " in output
    whole, parts = last(tmp_path / "whole"), last(tmp_path / "parts")
    check_resumed(whole["state_dict"], parts["state_dict"])
    # 160 points in batches of 10 on 2 ranks are 8 steps an epoch.
    check_resumed(whole["callbacks"]["CommHook"], parts["callbacks"]["CommHook"], steps=32)


def test_both_kinds_of_optimization_and_both_reducers(tmp_path: Path) -> None:
    first, second = cases(SCRIPT, "trains", tmp_path)
    for kind, steps in (("Automatic", 8), ("Manual", 16)):
        for strategy in ("ddp", "core"):
            seen = {s: first[f"{kind} {strategy} {s}"] for s in (None, "none", "int8")}
            # The same bits as Lightning's own, and others with a scheme that rounds.
            assert seen["none"]["weights"] == seen[None]["weights"]
            assert seen["int8"]["weights"] != seen[None]["weights"]
            assert {seen[s]["steps"] for s in ("none", "int8")} == {steps}
            assert min(seen[s]["calls"] for s in ("none", "int8")) >= steps
    assert {k: v for k, v in first.items() if k != "output"} == {
        k: v for k, v in second.items() if k != "output"
    }


def test_loggers_get_the_metrics(tmp_path: Path) -> None:
    first, _ = cases(SCRIPT, "logs", tmp_path)
    assert {"comm/wire_bytes", "comm/dense_wire_bytes", "step"} <= set(first["columns"])
    assert first["rows"] == 4


def test_what_would_not_run_is_an_error(tmp_path: Path) -> None:
    for seen in cases(SCRIPT, "refuses", tmp_path):
        assert "DDPStrategy(ddp_comm_hook=...) is set as well" in seen["hook of the strategy"]
        assert "more than one stateful callback" in seen["two callbacks"]  # Lightning's own
        assert "nothing is registered yet" in seen["before fit"]
        assert "did you mean 'int8'" in seen["unknown scheme"]
    (seen,) = cases(SCRIPT, "alone", tmp_path, ranks=0)
    assert seen["trained"] > 0


def test_a_hook_that_lightning_leaves_out_on_a_cpu_is_warned_of_at_the_end(tmp_path: Path) -> None:
    for ranks in (2, 0):  # by torchrun, and by Lightning itself
        for seen in cases(SCRIPT, "bare", tmp_path, ranks=ranks):
            assert seen["calls"] == 0
            assert "was never called" in seen["output"]
            assert "registers on CUDA only" in seen["output"]
