"""Computations of schemes, timed on the device at hand, and the time they take from backward."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch

from commhooks import Scheme
from commhooks.core import Bucket, Result
from commhooks.core._bucket import SchemeExchange
from commhooks.predict import (
    DEVICES,
    Device,
    Fabric,
    Layer,
    Link,
    ThisDevice,
    Workload,
    device,
    predict_step,
)
from commhooks.predict._device import (
    TAKE_TURNS,
    Contention,
    _share,
    _share_on_cpu,
    _share_on_gpu,
    measure_contention,
    time_parts,
)
from commhooks.predict._exchange_plan import Work, trace_exchange
from ddp_core import AllReduce, overlapped
from tests.tools import fake_torch

SHAPES = (torch.Size([300, 400]),)
BEFORE_S, BESIDE_S, AFTER_S = 0.04, 0.2, 0.08
# A sleep ends late, the more so where other processes run. Neither is taken for the other, or both.
LATE_S = 0.035


@dataclass(frozen=True)
class Sleeps(Scheme):
    """Averages; sleeps before its message, while it travels, and after it."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        _sleep(bucket, BEFORE_S)
        request = AllReduce(bucket.gradient)
        mean = yield from overlapped(request, lambda: _sleep(bucket, BESIDE_S))
        _sleep(bucket, AFTER_S)
        return Result(mean)


def _sleep(bucket: Bucket, seconds: float) -> None:
    bucket.gradient.clone()  # an operation, so that a plan knows of work
    if bucket.gradient.device.type != "meta":  # a plan, which takes no time
        time.sleep(seconds)


def assert_sleeps(parts: tuple[float, ...]) -> None:
    before, beside, after = parts
    assert BEFORE_S <= before <= BEFORE_S + LATE_S
    assert BESIDE_S <= beside <= BESIDE_S + LATE_S
    assert AFTER_S <= after <= AFTER_S + LATE_S


def test_the_parts_of_an_exchange_are_timed_apart() -> None:
    assert_sleeps(time_parts(Sleeps(), SHAPES, 4, torch.device("cpu")))


@pytest.mark.slow
def test_this_device_gives_the_time_of_buckets_that_it_has_not_timed() -> None:
    here = ThisDevice()
    assert_sleeps(here.parts(Sleeps(), SHAPES, 4))
    assert_sleeps(here.parts(Sleeps(), 2 * SHAPES, 4))


@pytest.mark.slow
def test_what_is_timed_here_makes_a_predicted_step_longer() -> None:
    work = Workload.of("small", [Layer("w", (300, 400), 1.0)], forward_s=0.01)
    fabric = Fabric("fast", Link(0.0, 1e15))
    steps = {
        machine.name: predict_step(Sleeps(), work, ranks=2, fabric=fabric, device=machine)
        for machine in (ThisDevice(), device("h100"))
    }
    all_s = BEFORE_S + BESIDE_S + AFTER_S
    assert all_s <= steps["cpu"].codec_s <= all_s + 3 * LATE_S
    assert steps["cpu"].exposed_s == pytest.approx(steps["cpu"].codec_s)
    assert steps["h100"].codec_s < 1e-3


def test_memory_is_timed_for_what_is_no_scheme() -> None:
    here = ThisDevice()
    few, more = (here.seconds(Work(nbytes, 1)) for nbytes in (10**8, 10**9))
    # Between 0.1 GB/s and 10 TB/s.
    assert 1e-5 < few < more < 10


def test_here_is_a_device_of_this_machine() -> None:
    here = device("here")
    assert isinstance(here, ThisDevice)
    there = torch.accelerator.current_accelerator(check_available=True)
    assert here.name == ("cpu" if there is None else str(there))


def test_messages_of_many_ranks_are_not_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_counts: list[int] = []

    def timed(scheme: Scheme, shapes: tuple[torch.Size, ...], ranks: int, _: object) -> tuple:
        rank_counts.append(ranks)
        return tuple(1.0 for _ in trace_exchange(scheme, shapes, ranks).work)

    monkeypatch.setattr(sys.modules["commhooks.predict._device"], "time_parts", timed)
    here = ThisDevice()
    for ranks in (2, 64, 65, 4096):
        here.parts(Sleeps(), SHAPES, ranks)
    assert rank_counts == [2, 2, 64, 64]


def test_a_gpu_is_two_figures_of_its_data_sheet() -> None:
    figures = {"t4": "65:320", "l4": "121:300", "a10": "125:600", "a100": "312:2000"}
    figures |= {"rtx3090": "71:936", "rtx4090": "165:1008", "h100": "989:3350"}
    for name, text in figures.items():
        assert device(text) == replace(DEVICES[name], name=text)
    for text in ("120", "120:", "120:600:1", "a:b", "0:600", "120:inf", "nan:600", "rtx2080"):
        with pytest.raises(ValueError, match=r"l4, a10, rtx3090.* TFLOPS:GB/s, as in 120:600"):
            device(text)


CUDA = torch.device("cuda")


def test_the_share_is_what_the_step_is_longer_per_second_of_the_side() -> None:
    assert _share(0.5, 2.0) == 0.25
    assert _share(-0.1, 2.0) == 0
    assert _share(3.0, 2.0) == 1
    assert _share(0.1, 0.0) == 1  # nothing ran on the side: nothing is known


class _Lockstep:
    """Has a clock of its own, and a side that runs once per step while it has a thread."""

    def __init__(self, share: float) -> None:
        self.share, self.now = share, 0.0
        self._begins, self._ran = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        """Takes a millisecond, and its share of the side's."""
        self.now += 1e-3
        if self._thread is not None and self._thread.is_alive():
            self._begins.release()
            assert self._ran.acquire(timeout=10)
            self.now += self.share * 5e-4

    def side(self) -> None:
        """Takes half a millisecond."""
        here = threading.current_thread()
        if here is threading.main_thread():
            self.now += 5e-4
        elif self._thread is not here:
            self._thread = here  # the first call, before anything is timed
        elif self._begins.acquire(timeout=0.1):
            self._ran.release()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_on_a_cpu_two_threads_are_compared(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    both = _Lockstep(share)
    clock = SimpleNamespace(perf_counter=both.clock)
    monkeypatch.setattr(sys.modules["commhooks.predict._device"], "time", clock)
    # The last call of a turn may not be counted yet: one of thirty.
    assert _share_on_cpu(both.step, both.side) == pytest.approx(share, rel=0.07)


def test_on_a_cpu_the_first_part_is_in_backward_and_no_thread_is_left() -> None:
    before = threading.active_count()
    contention = measure_contention("cpu")
    assert contention.first == 1
    assert contention.later == contention.moving
    assert threading.active_count() == before


def test_an_error_on_the_side_is_raised_and_no_thread_is_left() -> None:
    before, calls = threading.active_count(), []

    def side() -> None:
        calls.append(threading.current_thread())
        if calls[-1] is not threading.main_thread():
            raise ArithmeticError("the side")

    with pytest.raises(ArithmeticError, match="the side"):
        _share_on_cpu(lambda: sum(range(10_000)), side)
    assert threading.active_count() == before


class _Gpu(fake_torch.Device):
    """Runs a side's work beside a step's; a share of it makes the step longer."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.sides: list[SimpleNamespace] = []
        self._timed: object = None  # the stream on which the latest event was recorded

    def Stream(self, device=None, priority=0):  # type: ignore[no-untyped-def]
        self.sides.append(SimpleNamespace(device=device, priority=priority))
        return self.sides[-1]

    def Event(self, enable_timing=False):  # type: ignore[no-untyped-def]
        event = super().Event(enable_timing)
        record = event.record

        def noted(stream: object) -> None:
            self._timed = stream
            record(stream)

        event.record = noted
        return event

    def synchronize(self, device=None):  # type: ignore[no-untyped-def]
        super().synchronize()

    def step(self) -> None:
        assert self.current_stream() not in self.sides
        self.work(2.0)

    def side(self) -> None:
        assert self.current_stream() is self.sides[0]
        alone = self._timed in self.sides
        self.work(0.5 if alone else 0.5 * self.share)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_on_a_gpu_two_streams_are_compared(share: float) -> None:
    gpu = _Gpu(share)
    assert _share_on_gpu(gpu.step, gpu.side, module=gpu, device=CUDA) == pytest.approx(share)
    assert [side.priority for side in gpu.sides] == [-1]  # as those of exchanges


def test_a_device_without_streams_or_memory_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    full: Any = _Gpu(1.0)
    full.mem_get_info = lambda device: (2**20, 2**30)
    with TestCase().assertLogs("commhooks", "INFO") as log:  # caplog is off, see pyproject.toml
        for module in (SimpleNamespace(Event=object), full, _Gpu(1.0)):
            monkeypatch.setattr(torch, "get_device_module", lambda name, module=module: module)
            if module is not full and isinstance(module, _Gpu):
                monkeypatch.setattr(torch, "ones", no_room)
            assert measure_contention("cuda") == TAKE_TURNS
    reasons = ["no Stream", "no 300 MiB of free memory", "no memory left"]
    texts = [record.getMessage() for record in log.records]
    assert all(reason in text for reason, text in zip(reasons, texts, strict=True))


def test_what_was_measured_is_the_devices() -> None:
    measured = Contention(1.0, 0.25, 0.5)
    assert ThisDevice("cpu", contention=measured).contention == measured
    assert {device.contention for device in (*DEVICES.values(), ThisDevice())} == {TAKE_TURNS}
    with pytest.raises(TypeError, match=r"Device\(contention=\.\.\.\) is a .*Contention, got 0.5"):
        Device("own", 1e9, 1e-6, 1e12, contention=0.5)  # type: ignore[arg-type]
