"""Computations of schemes, timed on the device at hand: with a scheme that sleeps a known time."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import pytest
import torch

from commhooks import Scheme
from commhooks.core import Bucket, Result
from commhooks.core._bucket import SchemeExchange
from commhooks.predict import Fabric, Layer, Link, ThisDevice, Workload, device, predict_step
from commhooks.predict._device import time_parts
from commhooks.predict._exchange_plan import Work, trace_exchange
from ddp_core import AllReduce, overlapped

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
    asked: list[int] = []

    def timed(scheme: Scheme, shapes: tuple[torch.Size, ...], ranks: int, _: object) -> tuple:
        asked.append(ranks)
        return tuple(1.0 for _ in trace_exchange(scheme, shapes, ranks).work)

    monkeypatch.setattr(sys.modules["commhooks.predict._device"], "time_parts", timed)
    here = ThisDevice()
    for ranks in (2, 64, 65, 4096):
        here.parts(Sleeps(), SHAPES, ranks)
    assert asked == [2, 2, 64, 64]
