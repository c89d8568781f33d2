"""Gradients of Megatron-Core's DistributedDataParallel are compressed (make test-frameworks)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.jobs import cases, needs

pytestmark = [needs("megatron"), pytest.mark.distributed, pytest.mark.timeout(700)]

# Of two ranks' sums in bfloat16, one rounding each is Megatron-Core's own.
ALLOWED = {"none": 2**-8, "bf16": 2**-7, "int8": 0.03}


def test_megatron_gets_shards_of_gradients_by_a_scheme(tmp_path: Path) -> None:
    for report in cases("megatron_cases.py", "reduces", tmp_path):
        report.pop("output")
        assert len(report) == 12
        for case, error in report.items():
            scheme, dtype, _ = case.split()
            exact = scheme == "none" and dtype == "torch.float32"
            assert (error == 0) if exact else (error <= ALLOWED[scheme]), (case, error)


def test_a_function_that_megatron_does_not_call_is_warned_of_at_the_end(tmp_path: Path) -> None:
    for report in cases("megatron_cases.py", "left_out", tmp_path):
        assert report.pop("in time") == []
        for how in ("after the model was made", "without the setting"):
            (text,) = report[how]
            assert "ReduceScatter(" in text
            assert "before DistributedDataParallel is made" in text
