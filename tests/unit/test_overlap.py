"""Work beside a collective, without a group: drivers that do it, and those that do not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, PerParameter, Rule, Simulation
from commhooks.core import AllReduce, overlapped
from commhooks.schemes import ACPSGD, PowerSGD
from ddp_core import Collective, simulate
from ddp_core.exchange._lanes import _discard

Average = Generator[Collective, Tensor, Tensor]


def average(work: Callable[[], None]) -> Average:
    return (yield from overlapped(AllReduce(torch.ones(2)), work))


def answered(exchange: Average, *, driver_works: bool) -> Tensor:
    """Drives an exchange of one collective."""
    request = next(exchange)
    if driver_works:
        request.run_overlap()
    with pytest.raises(StopIteration) as stop:
        exchange.send(request.tensor)
    result: Tensor = stop.value.value
    return result


@pytest.mark.parametrize("driver_works", [False, True])
def test_work_is_done_once_whoever_drives_the_exchange(driver_works: bool) -> None:
    done: list[int] = []
    assert answered(average(lambda: done.append(1)), driver_works=driver_works).tolist() == [1, 1]
    assert done == [1]


@pytest.mark.parametrize("driver_works", [False, True])
def test_an_exchange_raises_what_its_work_raised(driver_works: bool) -> None:
    def work() -> None:
        raise ValueError("no room")

    exchange = average(work)
    request = next(exchange)
    if driver_works:
        request.run_overlap()
    with pytest.raises(ValueError, match="no room"):
        exchange.send(request.tensor)


def test_a_collective_that_fails_leaves_its_work_undone() -> None:
    done: list[int] = []
    exchange = average(lambda: done.append(1))
    request = next(exchange)
    with pytest.raises(RuntimeError, match="a link broke"):
        exchange.throw(RuntimeError("a link broke"))
    request.run_overlap()  # as a driver may that comes late
    assert not done


def test_simulated_ranks_work_before_the_collective_and_after_it_in_turn() -> None:
    tensors = [torch.tensor([float(rank)]) for rank in range(4)]
    seen: dict[int, float] = {}

    def rank(number: int) -> Average:
        tensor = tensors[number]
        request = AllReduce(tensor, "sum")
        return (yield from overlapped(request, lambda: seen.update({number: float(tensor)})))

    simulate([rank(number) for number in range(4)])
    assert [seen[number] for number in range(4)] == [0.0, 6.0, 2.0, 6.0]


@pytest.mark.parametrize("scheme", [PowerSGD(rank=2), ACPSGD(rank=2)])
def test_parts_whose_messages_are_merged_keep_the_same_residual(scheme: ACPSGD | PowerSGD) -> None:
    shapes = {"a": (20, 30), "b": (30, 20)}
    whole = Simulation(ErrorFeedback(scheme), shapes, world_size=2)
    # Two parts of one scheme: their messages travel as one, which has no work.
    rule = Rule(ErrorFeedback(scheme), name="a")
    parts = Simulation(PerParameter([rule], ErrorFeedback(scheme)), shapes, world_size=2)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(1200, generator=generator) for _ in range(2)]
        means = [ranks.step([grad.clone() for grad in grads]) for ranks in (whole, parts)]
        torch.testing.assert_close(means[0][0], means[1][0])
        for rank in range(2):
            torch.testing.assert_close(whole.memory(rank), parts.memory(rank))


def test_lanes_that_are_given_up_keep_their_groups_until_their_collectives_have_ended() -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for event in (0, 1, (1, None), (0, None)):  # work beside both collectives, then their ends
        events.put(event)
    left: list[int] = []
    group = SimpleNamespace(discard=lambda: left.append(events.qsize()))
    lanes: Any = SimpleNamespace(_lane_groups=[group], _fail_all=lambda: 2)
    _discard(lanes, threading.Event(), events)
    assert left == [0]
