"""What an exchange's computations take from backward."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from commhooks.predict import DEVICES, ThisDevice
from commhooks.predict.contention import (
    TAKE_TURNS,
    Contention,
    _share,
    _share_on_cpu,
    _share_on_gpu,
    measure_contention,
)
from tests.unit.pretended import Device

CUDA = torch.device("cuda")


def test_the_share_is_what_the_step_is_longer_per_second_of_the_side() -> None:
    assert _share(0.5, 2.0) == 0.25
    assert _share(-0.1, 2.0) == 0
    assert _share(3.0, 2.0) == 1
    assert _share(0.1, 0.0) == 0  # nothing ran on the side


def test_on_a_cpu_the_first_part_is_in_backward_and_no_thread_is_left() -> None:
    before = threading.active_count()
    found = measure_contention("cpu")
    assert found.first == 1
    assert found.later == found.moving
    assert threading.active_count() == before


def test_an_error_on_the_side_is_raised_and_no_thread_is_left() -> None:
    before, calls = threading.active_count(), []

    def side() -> None:
        calls.append(threading.current_thread())
        if calls[-1] is not threading.main_thread():
            raise ArithmeticError("the side")

    with pytest.raises(ArithmeticError, match="the side"):
        _share_on_cpu(lambda: time.sleep(1e-3), side)
    assert threading.active_count() == before


class _Gpu(Device):
    """Runs all streams one after the other, or the side at no cost."""

    def __init__(self, *, side_costs: bool) -> None:
        super().__init__()
        self.side_costs = side_costs
        self.sides: list[SimpleNamespace] = []

    def Stream(self, device=None, priority=0):  # type: ignore[no-untyped-def]
        self.sides.append(SimpleNamespace(device=device, priority=priority))
        return self.sides[-1]

    def synchronize(self, device=None):  # type: ignore[no-untyped-def]
        super().synchronize()

    def step(self) -> None:
        assert self.current_stream() not in self.sides
        self.work(2.0)

    def side(self) -> None:
        assert self.current_stream() is self.sides[0]
        timed_alone = self.alone
        self.work(0.5 if self.side_costs or timed_alone else 0.0)

    @property
    def alone(self) -> bool:
        """Whether the latest event was recorded on the side's stream: it is timed by itself."""
        return self.begun in self.sides

    begun: object = None

    def Event(self, enable_timing=False):  # type: ignore[no-untyped-def]
        event = super().Event(enable_timing)
        record = event.record

        def noted(stream=None):  # type: ignore[no-untyped-def]
            self.begun = stream
            record(stream)

        event.record = noted
        return event


@pytest.mark.parametrize(("side_costs", "share"), [(True, 1.0), (False, 0.0)])
def test_on_a_gpu_two_streams_are_compared(side_costs: bool, share: float) -> None:
    gpu = _Gpu(side_costs=side_costs)
    assert _share_on_gpu(gpu.step, gpu.side, module=gpu, device=CUDA) == share
    assert [one.priority for one in gpu.sides] == [-1]  # as those of exchanges


def test_a_device_without_streams_or_memory_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(Event=object))
    assert measure_contention("mps") == TAKE_TURNS

    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "get_device_module", lambda name: _Gpu(side_costs=True))
    monkeypatch.setattr(torch, "ones", no_room)
    assert measure_contention("cuda") == TAKE_TURNS


def test_what_was_measured_is_the_devices() -> None:
    measured = Contention(1.0, 0.25, 0.5)
    assert ThisDevice("cpu", contention=measured).contention == measured
    assert {one.contention for one in (*DEVICES.values(), ThisDevice())} == {TAKE_TURNS}
