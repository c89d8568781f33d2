"""Plans of the next step's buckets, by what has happened; without the message among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.reducer import _plan as _plan
from ddp_core.reducer._parameters import Trained, trained_parameters
from ddp_core.reducer._plan import BucketCaps, BucketPlan, SavedBuckets, Stage

SMALL, LARGE = BucketCaps((64,)), BucketCaps((128,))  # one or two of the parameters below
FORWARD = [0, 1, 2, 3]  # the reverse of what is assumed before gradients have come


def parameters() -> list[Trained]:
    return trained_parameters(nn.ParameterList(nn.Parameter(torch.zeros(16)) for _ in range(4)))


def saved(members: Any = (), limits: Any = (), arrival: Any = ()) -> SavedBuckets:
    return SavedBuckets(tuple(map(tuple, members)), tuple(limits), tuple(arrival))


FINAL = saved([[1], [0], [3], [2]], SMALL.limits, FORWARD)  # by an earlier order
ODD_AND_EVEN: Callable[..., Any] = lambda name, _: int(name) % 2  # noqa: E731


class Course:
    """A plan, and the buckets that it has led to."""

    def __init__(self, *, follows_arrival: bool = True, static_graph: bool = False) -> None:
        self.plan = BucketPlan(parameters(), SMALL, None, torch.device("cpu"))  # type: ignore
        self.plan.follows_arrival, self.plan.static_graph = follows_arrival, static_graph
        self.buckets = self.plan.initial()

    def begin_step(self) -> bool:
        """Returns whether the ranks had to agree on buckets."""
        new = self.plan.rebuild(self.buckets)
        self.buckets = self.buckets if new is None else new
        return new is not None

    def step(self, order: list[int] = FORWARD) -> bool:
        agreed = self.begin_step()
        self.plan.step_ended(list(order))
        return agreed

    def goes_on(self) -> Course:
        """A run that begins with what this one would save now."""
        plan = self.plan
        other = Course(follows_arrival=plan.follows_arrival, static_graph=plan.static_graph)
        other.plan.resume(saved(*self.plan.to_save(self.buckets)))
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
    assert [course.step() for _ in range(3)] == [0, 1, 0]  # the compiler may have split a graph
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
    of = [trained.parameter for trained in course.plan._parameters]
    course.plan.add_splits([[id(of[3]), id(of[1])], [id(of[2]), id(of[0])]])
    course.plan.step_ended([3, 1, 2, 0])
    for _ in range(2):
        course.step([3, 1, 2, 0])


COURSES = [
    *(lambda _: None, asked_before_the_first_step, after_one_step, after_many),
    *(switched, switched_back, resized, split_by_the_compiler),
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
    busy.plan.resume(saved(*first.plan.to_save(first.buckets)))
    for course in (fresh, busy):
        course.plan.request(first.plan.group_of, first.plan.caps)
    for _ in range(4):
        fresh.step()
        busy.step()
        assert fresh.buckets == busy.buckets


BY_ARRIVAL = [[0], [1], [2], [3]]
BEGUN = saved([[2, 0], [1, 3]])  # buckets of a run that was saved before it knew its order
# What happens before the first step, and the buckets of the two first steps.
LOADED: dict[str, tuple[list[Any], Any, Any]] = {
    "final buckets are taken up": ([FINAL], FINAL.members, FINAL.members),
    "the last state decides": ([(ODD_AND_EVEN,), (None,), FINAL], FINAL.members, FINAL.members),
    "first buckets hold until the order is known": ([BEGUN], BEGUN.members, BY_ARRIVAL),
    "buckets that mix groups do not suit": (
        [(ODD_AND_EVEN, LARGE), saved([[0, 1], [2, 3]], LARGE.limits, FORWARD)],
        *([[0, 2], [1, 3]], [[0, 2], [1, 3]]),
    ),
    **{
        f"the order decides instead of {unsuitable.members}": ([unsuitable], BY_ARRIVAL, BY_ARRIVAL)
        for unsuitable in (
            saved([[1], [0], [3], [2]], LARGE.limits, FORWARD),
            saved([[1], [0], [3], [4]], SMALL.limits, FORWARD),
            saved([[1], [0], [3]], SMALL.limits, FORWARD),
            saved((), SMALL.limits, FORWARD),
            saved((), (), FORWARD),
        )
    },
}


@pytest.mark.parametrize("which", LOADED)
def test_what_is_loaded_decides_the_first_steps(which):
    events, first, second = LOADED[which]
    course = Course()
    for event in events:
        load = isinstance(event, SavedBuckets)
        course.plan.resume(event) if load else course.plan.request(*event)
    course.step()
    assert course.buckets == list(map(list, first))
    assert (course.plan.stage is Stage.FINAL) == (events != [BEGUN])
    assert course.step() != (first is FINAL.members)
    assert course.buckets == list(map(list, second))


def test_buckets_by_arrival_are_no_buckets_by_registration():
    """Saved buckets of torch's class do not replace first buckets that stay."""
    course = Course(follows_arrival=False)
    course.plan.resume(BEGUN)
    course.step()
    assert course.buckets == [[3], [2], [1], [0]]


@pytest.mark.parametrize("requested", [(ODD_AND_EVEN, None), (None, LARGE)])
def test_what_is_asked_for_after_loading_is_not_forgotten(requested):
    """Also where it is taken back: a run that was not interrupted is laid out anew."""
    course = Course()
    course.plan.resume(FINAL)
    course.plan.request(*requested)
    course.plan.request(None, SMALL)
    assert course.plan.to_save(course.buckets) == ((), SMALL.limits, FORWARD)
    course.step()
    assert course.buckets == [[0], [1], [2], [3]]


SPLITS = [[3, 1], [2, 0]]


def compiles(course: Course) -> None:
    """Tells the plan of splits, as the forward pass of a compiled model does."""
    of = [trained.parameter for trained in course.plan._parameters]
    course.plan.add_splits([[id(of[index]) for index in split] for split in SPLITS])


@pytest.mark.parametrize("kind", KINDS)
def test_the_compilers_splits_become_buckets(kind):
    course = Course(**kind)
    split_by_the_compiler(course)
    assert course.buckets == SPLITS
    assert not course.step()


def test_splits_of_the_compiler_are_known_in_buckets_that_were_taken_up():
    first = Course()
    split_by_the_compiler(first)
    second = first.goes_on()
    assert second.begin_step()
    assert second.buckets == SPLITS
    compiles(second)
    second.plan.step_ended(FORWARD)
    assert not second.step()  # no rank has to be asked
    assert second.buckets == SPLITS


def compiled_step(course: Course, order: list[int]) -> None:
    course.begin_step()
    compiles(course)
    course.plan.step_ended(order)


@pytest.mark.parametrize("follows_arrival", [True, False])
def test_a_compiled_run_that_goes_on_is_laid_out_by_the_order_of_the_first_step(follows_arrival):
    """Orders differ by step; what travels together is what did in the run that was saved."""
    first = Course(follows_arrival=follows_arrival)
    compiled_step(first, [2, 0, 3, 1])
    second = first.goes_on()
    for course in (first, second):
        compiled_step(course, [3, 2, 1, 0])
    third = second.goes_on()  # its buckets have no splits yet
    for order in (FORWARD, [1, 3, 0, 2]):
        for course in (first, second, third):
            compiled_step(course, order)
    assert first.buckets == second.buckets == third.buckets == [[2, 0], [3, 1]]


@pytest.mark.parametrize("follows_arrival", [True, False])
def test_an_evaluation_that_compiles_before_the_first_step_loses_no_buckets(follows_arrival):
    course = Course(follows_arrival=follows_arrival)
    course.plan.resume(FINAL)
    compiles(course)
    assert course.plan.to_save(course.buckets) == (FINAL.members, SMALL.limits, FORWARD)
    course.step()
    assert course.buckets == [[1], [0], [3], [2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("goes_on_from", [None, saved(), saved([[3, 2, 1, 0]], (), FORWARD), FINAL])
def test_a_rank_that_compiles_nothing_agrees_with_the_others(goes_on_from, kind):
    busy, idle = Course(**kind), Course(**kind)
    for course in (busy, idle):
        if goes_on_from is not None:
            course.plan.resume(goes_on_from)
    for _ in range(4):
        assert busy.begin_step() == idle.begin_step()
        compiles(busy)
        busy.plan.step_ended(FORWARD)
        idle.plan.step_ended(None)


def test_splits_do_not_mix_what_a_scheme_keeps_apart():
    course = Course()
    course.plan.request(lambda name, _: int(name) < 2)
    split_by_the_compiler(course)
    assert all(len({index < 2 for index in bucket}) == 1 for bucket in course.buckets)


def test_what_is_laid_out_anew_in_the_first_step_is_split_in_the_second():
    course = Course()
    course.plan.resume(FINAL)
    course.begin_step()
    course.plan.request(ODD_AND_EVEN)
    course.plan.request(None)
    course.begin_step()
    assert course.plan.stage is Stage.FINAL
    compiles(course)
    course.plan.step_ended([3, 1, 2, 0])
    course.step()
    assert sorted(map(sorted, course.buckets)) == sorted(map(sorted, SPLITS))


def test_the_same_groups_asked_for_again_are_laid_out_anew():
    """A hook may group parameters otherwise when it is asked once more."""
    course = Course()
    switched(course)
    course.step()
    course.plan.request(ODD_AND_EVEN)
    course.step([3, 2, 1, 0])
    course.plan.request(ODD_AND_EVEN)
    course.step()
    assert course.buckets == [[3], [2], [1], [0]]


def test_what_the_ranks_could_not_agree_on_is_kept(monkeypatch):
    def fails(*_: Any) -> Any:
        raise RuntimeError("a peer died")

    course = Course()
    course.plan.resume(FINAL)
    monkeypatch.setattr(_plan, "agree_on", fails)
    with pytest.raises(RuntimeError, match="a peer died"):
        course.begin_step()
    assert course.plan.to_save(course.buckets) == (FINAL.members, SMALL.limits, FORWARD)


def test_a_rank_without_input_takes_the_order_of_registration():
    course = Course()
    course.begin_step()
    course.plan.step_ended(None)
    assert course.plan.arrival == [0, 1, 2, 3]
    course.plan.step_ended([2, 1, 0, 3])
    course.plan.step_ended(None)
    assert course.plan.arrival == [2, 1, 0, 3]


def test_an_incomplete_order_is_not_taken():
    course = Course()
    course.step([0, 1])
    assert course.plan.arrival == []
    assert not course.begin_step()
