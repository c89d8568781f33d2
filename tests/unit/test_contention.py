"""What an exchange's computations take from backward."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from commhooks.predict import DEVICES, ThisDevice
from commhooks.predict.contention import Contention, measure_contention


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="keeps threads to one core")
def test_on_one_core_backward_and_computations_take_turns() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    try:
        found = measure_contention("cpu")
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    assert found.first == 1  # a bucket's first computations run in backward's thread
    assert found.later > 0.5


def test_contention_is_measured_once_and_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []

    def measured(device: torch.device) -> Contention:
        asked.append(device)
        return Contention(1.0, 0.25)

    # By its name in sys.modules: `commhooks.predict.device` is the function.
    module = sys.modules["commhooks.predict.device"]
    monkeypatch.setattr(module, "measure_contention", measured)
    here = ThisDevice("cpu")
    assert asked == []
    assert here.takes() == here.takes() == (1.0, 0.25)
    assert asked == [torch.device("cpu")]


def test_a_device_that_was_not_measured_takes_all() -> None:
    assert {one.takes() for one in DEVICES.values()} == {(1.0, 1.0)}
