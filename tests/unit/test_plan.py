"""What the next step's buckets are, by what has happened; the message among ranks left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core import _plan
from ddp_core._layout import BucketCaps
from ddp_core._parameters import Trained, trained_parameters
from ddp_core._plan import BucketPlan, SavedBuckets, Stage

SMALL, LARGE = BucketCaps((64,)), BucketCaps((128,))  # one or two of the parameters below
FORWARD = [0, 1, 2, 3]  # the reverse of what is assumed before gradients have come


def parameters() -> list[Trained]:
    return trained_parameters(nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(4)))


def saved(members: Any = (), limits: Any = (), arrival: Any = ()) -> SavedBuckets:
    return SavedBuckets(tuple(map(tuple, members)), tuple(limits), tuple(arrival), lambda: None)


FINAL = saved([[1], [0], [3], [2]], SMALL.limits, FORWARD)  # by an earlier order
ODD_AND_EVEN: Callable[..., Any] = lambda name, _: int(name) % 2  # noqa: E731


class Course:
    """A plan, and the buckets that it has led to."""

    def __init__(
        self,
        *,
        follows_arrival: bool = True,
        static_graph: bool = False,
        caps: BucketCaps = SMALL,
    ) -> None:
        self.plan = BucketPlan(parameters(), caps, None, torch.device("cpu"))  # type: ignore
        self.plan.follows_arrival, self.plan.static_graph = follows_arrival, static_graph
        self.buckets = self.plan.initial()

    def begin_step(self) -> bool:
        """Whether the ranks had to agree on buckets."""
        new = self.plan.rebuild()
        self.buckets = self.buckets if new is None else new
        return new is not None

    def step(self, order: list[int] = FORWARD) -> bool:
        agreed = self.begin_step()
        self.plan.take_arrival(list(order))
        return agreed

    def goes_on(self) -> Course:
        """A run that begins with what this one would save now."""
        plan = self.plan
        other = Course(follows_arrival=plan.follows_arrival, static_graph=plan.static_graph)
        members, limits = self.plan.to_save(self.buckets)
        other.plan.go_on_from(saved(members, limits, self.plan.arrival))
        return other


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plan, "agree_on", lambda buckets, final, *_: (list(buckets), final))


def test_buckets_are_laid_out_by_arrival_once():
    course = Course()
    assert course.buckets == [[0, 1, 2, 3]]  # one holds all
    assert [course.step(order) for order in ([0, 2, 1, 3], FORWARD, FORWARD)] == [0, 1, 0]
    assert course.buckets == [[0], [2], [1], [3]]
    assert course.plan.rebuilt
    assert course.plan.arrival == FORWARD


def test_without_arrival_the_first_buckets_stay():
    course = Course(follows_arrival=False)
    assert not course.step()
    assert not course.step()
    assert course.buckets == [[3], [2], [1], [0]]
    assert not course.plan.rebuilt


def test_a_static_graph_is_laid_out_by_its_second_step():
    course = Course(static_graph=True)
    course.step([3, 1, 2, 0])
    assert not course.step()
    assert course.step()
    assert course.buckets == [[0], [1], [2], [3]]


def switched(course: Course) -> None:
    course.step()
    course.step()
    course.plan.request(ODD_AND_EVEN)


def switched_back(course: Course) -> None:
    switched(course)
    course.plan.request(None)


def resized(course: Course) -> None:
    course.step([0, 2, 1, 3])
    course.step()
    course.plan.request(None, LARGE)


def asked_before_the_first_step(course: Course) -> None:
    course.plan.request(ODD_AND_EVEN)


def after_one_step(course: Course) -> None:
    course.step([0, 2, 1, 3])


def after_many(course: Course) -> None:
    for order in ([0, 2, 1, 3], FORWARD, FORWARD):
        course.step(order)


def split_by_the_compiler(course: Course) -> None:
    course.begin_step()
    of = [one.parameter for one in course.plan._parameters]
    course.plan.take_splits([[id(of[3]), id(of[1])], [id(of[2]), id(of[0])]], first_step=True)
    course.plan.take_arrival([3, 1, 2, 0])
    for _ in range(2):  # before, a run that goes on cannot know what its compiler will choose
        course.step([3, 1, 2, 0])


COURSES = [
    lambda _: None,
    asked_before_the_first_step,
    after_one_step,
    after_many,
    switched,
    switched_back,
    resized,
    split_by_the_compiler,
]


KINDS = [{}, {"follows_arrival": False}, {"static_graph": True}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("happened", COURSES)
def test_a_run_that_goes_on_has_the_same_buckets(happened, kind):
    first = Course(**kind)
    happened(first)
    second = first.goes_on()
    second.plan.request(first.plan.group_of, first.plan.caps)
    third = second.goes_on()  # saved before its first step
    third.plan.request(first.plan.group_of, first.plan.caps)
    for _ in range(4):
        for course in (first, second, third):
            course.step()
        assert first.buckets == second.buckets == third.buckets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("happened", COURSES)
def test_a_run_under_way_that_loads_is_as_one_that_begins(happened, kind):
    first = Course(**kind)
    happened(first)
    fresh, busy = first.goes_on(), Course(**kind)
    busy.step([3, 0, 1, 2])
    busy.step()
    members, limits = first.plan.to_save(first.buckets)
    busy.plan.go_on_from(saved(members, limits, first.plan.arrival))
    for course in (fresh, busy):
        course.plan.request(first.plan.group_of, first.plan.caps)
    for _ in range(4):
        fresh.step()
        busy.step()
        assert fresh.buckets == busy.buckets


def test_final_buckets_are_taken_up():
    course = Course()
    course.plan.go_on_from(FINAL)
    course.step()
    assert course.buckets == [[1], [0], [3], [2]]
    assert course.plan.stage is Stage.TAKEN_UP
    assert not course.step()


@pytest.mark.parametrize(
    "unsuitable",
    [
        saved([[1], [0], [3], [2]], LARGE.limits, FORWARD),
        saved([[1], [0], [3], [4]], SMALL.limits, FORWARD),
        saved([[1], [0], [3]], SMALL.limits, FORWARD),
        saved((), SMALL.limits, FORWARD),
        saved((), (), FORWARD),
    ],
)
def test_the_saved_order_decides_where_the_buckets_do_not_suit(unsuitable):
    course = Course()
    course.plan.go_on_from(unsuitable)
    course.step()
    assert course.buckets == [[0], [1], [2], [3]]
    assert course.plan.stage is Stage.FINAL


def test_buckets_that_mix_groups_do_not_suit():
    course = Course(caps=LARGE)
    course.plan.request(ODD_AND_EVEN)
    course.plan.go_on_from(saved([[0, 1], [2, 3]], LARGE.limits, FORWARD))
    course.step()
    assert course.buckets == [[0, 2], [1, 3]]


@pytest.mark.parametrize("asked", [(ODD_AND_EVEN, None), (None, LARGE)])
def test_what_is_asked_for_after_loading_is_not_forgotten(asked):
    """Also where it is taken back: a run that was not interrupted is laid out anew."""
    course = Course()
    course.plan.go_on_from(FINAL)
    course.plan.request(*asked)
    course.plan.request(None, SMALL)
    assert course.plan.to_save(course.buckets) == ((), SMALL.limits)
    course.step()
    assert course.buckets == [[0], [1], [2], [3]]


def test_the_first_steps_buckets_hold_until_the_order_is_known():
    course = Course()
    course.plan.go_on_from(saved([[2, 0], [1, 3]]))
    course.step()
    assert course.buckets == [[2, 0], [1, 3]]
    assert course.step()
    assert course.buckets == [[0], [1], [2], [3]]


def test_splits_of_the_compiler_are_known_in_buckets_that_were_taken_up():
    first = Course()
    split_by_the_compiler(first)
    assert first.buckets == [[3, 1], [2, 0]]
    second = first.goes_on()
    split_by_the_compiler(second)
    assert second.buckets == [[3, 1], [2, 0]]
    assert second.plan.stage is Stage.TAKEN_UP


def test_splits_come_too_late_for_buckets_that_stay():
    course = Course(follows_arrival=False)
    split_by_the_compiler(course)
    assert course.buckets == [[3, 1], [2, 0]]


def test_a_rank_without_input_takes_the_order_of_registration():
    course = Course()
    course.begin_step()
    course.plan.assume_arrival()
    assert course.plan.arrival == [0, 1, 2, 3]
    course.plan.take_arrival([2, 1, 0, 3])
    course.plan.assume_arrival()
    assert course.plan.arrival == [2, 1, 0, 3]


def test_an_incomplete_order_is_not_taken():
    course = Course()
    course.step([0, 1])
    assert course.plan.arrival == []
    assert not course.begin_step()
