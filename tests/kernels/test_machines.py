"""The runner of kernels on a GPU, tried on the CPU."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch

from commhooks.kernels import levels, low_rank
from commhooks.kernels.finite import finite_op
from tests.kernels import fuzz, test_low_rank
from tests.kernels.inputs import unaligned
from tests.kernels.machines import GpuRunner, machines

RUNNER = GpuRunner("cpu", device="cpu")


@pytest.mark.parametrize("family", fuzz.FAMILIES, ids=fuzz.family_name)
def test_random_calls_of_every_op_leave_guards_and_inputs(family: Any) -> None:
    rng = random.Random(0)
    for _ in range(5):
        family.fuzz(RUNNER, rng)


@pytest.mark.parametrize(("shift", "place"), [(-1, "before"), (100, "behind")])
def test_a_write_out_of_bounds_is_seen(monkeypatch: Any, shift: int, place: str) -> None:
    def overwrites(x: torch.Tensor, answer: torch.Tensor) -> None:
        ctypes.memset(x.data_ptr() + shift, 0, 1)

    monkeypatch.setitem(finite_op.kernels, "cpu", overwrites)
    with pytest.raises(AssertionError, match=f"writes {place} finite.x"):
        RUNNER(finite_op, torch.ones(25), torch.ones((), dtype=torch.bool))


def test_a_write_to_an_input_is_seen(monkeypatch: Any) -> None:
    monkeypatch.setitem(finite_op.kernels, "cpu", lambda x, answer: x.zero_())
    with pytest.raises(AssertionError, match="finite writes to x"):
        RUNNER(finite_op, torch.ones(25), torch.ones((), dtype=torch.bool))


def test_copies_have_the_same_offset(monkeypatch: Any) -> None:
    seen: list[int] = []
    monkeypatch.setitem(finite_op.kernels, "cpu", lambda x, _: seen.append(x.data_ptr() % 64))
    x = unaligned(64)
    RUNNER(finite_op, x, torch.ones((), dtype=torch.bool))
    assert seen == [x.data_ptr() % 64]
    assert seen[0]


def test_a_table_of_levels_is_copied(monkeypatch: Any) -> None:
    """A kernel that gets the host's address ends with an error, as do all later ones."""
    seen: list[int] = []
    op = levels.dequantize_levels_op
    monkeypatch.setitem(op.kernels, "cpu", lambda _, table, *rest: seen.append(table.data_ptr()))
    table = torch.zeros(3)
    RUNNER(op, torch.zeros(1, 16, dtype=torch.uint8), table, torch.zeros(64), 64, 64, 1.0)
    assert seen
    assert table.data_ptr() not in seen


def test_a_table_is_not_written_to() -> None:
    matrices = test_low_rank.MATRICES
    left, right = test_low_rank.factors()
    version = matrices.table._version
    x = test_low_rank.bucket()
    RUNNER(low_rank.multiply_left_op, x, None, None, matrices.table, left, right, None, None, None)
    assert matrices.table._version == version


def test_a_gpu_alone_needs_no_library_and_no_emulator(monkeypatch: Any) -> None:
    monkeypatch.setenv("COMMHOOKS_TEST_MACHINES", "gpu")
    monkeypatch.setattr("commhooks.kernels.runtime.cpu._library", None)
    assert machines() == ["gpu"]
