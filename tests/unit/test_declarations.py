"""Declarations of schemes: traits, and the tensors that they keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from commhooks import ErrorFeedback, PerParameter, Rule, Scheme, make
from commhooks.core import Biased, Bucket, Codec, Exact, Layout, Result, Slot, Traits, Unbiased
from commhooks.core._scheme import SchemeExchange, slots_of
from commhooks.core._slot import Number
from commhooks.core._traits import composed, worst
from commhooks.errors import SchemeError
from commhooks.research._simulation import Simulation
from ddp_core import AllReduce

CALLS = Slot("test.calls")


@dataclass(frozen=True)
class Counts(Scheme):
    """Averages, and counts its steps per entry."""

    keeps = (CALLS,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        bucket.write(CALLS, bucket.read(CALLS) + 1)
        mean = yield AllReduce(bucket.gradient)
        return Result(mean)


def test_a_slot_is_read_as_it_was_written_a_step_before() -> None:
    ranks = Simulation(Counts(), {"a": (2, 3), "b": (4,)}, world_size=2)
    for _ in range(3):
        ranks.step([torch.ones(10), torch.ones(10)])
    bad = torch.full((10,), torch.inf)
    ranks.step([bad, torch.ones(10)])
    assert ranks.memory(0, "test.calls").tolist() == [3.0] * 10


@dataclass(frozen=True)
class Writes(Scheme):
    """Returns the gradient of the step before, and keeps this one's."""

    entries: int | None = None

    traits = Traits(returns="update")
    keeps = (CALLS,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        before = bucket.read(CALLS).clone()
        bucket.write(CALLS, bucket.gradient[: self.entries])
        yield AllReduce(bucket.gradient)
        return Result(bucket.output.copy_(before))


@dataclass(frozen=True)
class Undeclared(Writes):
    """The same, without a declaration of the slot."""

    keeps = ()


def test_a_bucket_may_be_kept_although_its_tensor_is_used_again() -> None:
    ranks = Simulation(Writes(), {"a": (3,)}, world_size=2)
    for step in range(3):
        means = ranks.step([torch.full((3,), float(step)), torch.full((3,), float(step))])
        assert means[0].tolist() == [max(0.0, step - 1.0)] * 3


@pytest.mark.parametrize(
    ("scheme", "words"),
    [(Undeclared(), "list the slot in the scheme's `keeps`"), (Writes(2), "3 entries .* got 2")],
)
def test_a_write_that_would_be_lost_is_refused(scheme: Scheme, words: str) -> None:
    ranks = Simulation(scheme, {"a": (3,)}, world_size=2)
    with pytest.raises(SchemeError, match=words):
        ranks.step([torch.ones(3), torch.ones(3)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_slot_is_as_wide_as_the_gradient_and_32_bits_at_least(dtype: torch.dtype) -> None:
    bucket = Bucket(torch.zeros(3, dtype=dtype), Layout(["p"], [(3,)]))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert bucket.read(CALLS).dtype == wide
    assert bucket.read(Slot("test.bytes", dtype=torch.uint8)).dtype == torch.uint8


def test_a_slot_of_numbers_has_one_per_parameter() -> None:
    bucket = Bucket(torch.zeros(7), Layout(["a", "b"], [(3,), (2, 2)]))
    number = Number("test.number")
    assert bucket.read(number).tolist() == [0.0, 0.0]
    assert number.check(torch.tensor(1.0), torch.Size([3])) is None
    assert "not 0 or more" in str(number.check(torch.tensor(-1.0), torch.Size([3])))
    assert "not one number" in str(number.check(torch.ones(3), torch.Size([3])))


def test_a_wrapper_has_the_slots_inside_by_construction() -> None:
    assert slots_of(ErrorFeedback(make("powersgd", error_feedback=False)))[0].key == "residual"
    keys = [slot.key for slot in slots_of(make("powersgd", wire_dtype="fp16", start_step=3))]
    assert keys == ["residual", "powersgd.q"]


def test_a_parameter_begins_with_the_slots_of_its_own_scheme() -> None:
    scheme = PerParameter([Rule(Counts(), max_dim=1)], default=make("acpsgd"))
    first = scheme.begins_with("b", torch.Size([5]), torch.float32, 0)
    other = scheme.begins_with("w", torch.Size([5, 5]), torch.float32, 0)
    assert [slot.key for slot in first] == ["test.calls"]
    assert [slot.key for slot in other] == ["residual", "acpsgd.p", "acpsgd.q"]


def test_a_choice_has_the_worst_of_all_errors_and_what_it_returns() -> None:
    noisy, near = Traits(error=Unbiased(2.0)), Traits(rounds=3, error=Unbiased(0.5))
    assert worst([noisy, near]) == Traits(rounds=3, error=Unbiased(2.0))
    assert worst([noisy, Traits(error=Biased())]).error == Biased()
    assert worst([Traits(returns="local"), Traits()]).returns == "local"
    assert worst([Traits(returns="local"), Traits(returns="update")]).returns == "update"
    assert not worst([Traits(agrees=False), Traits()]).agrees
    assert worst([Traits(coalesce=True), Traits()]).coalesce


def test_errors_of_several_roundings_add_up() -> None:
    assert composed(Exact(), Exact()) == Exact()
    assert composed(Unbiased(1.0), Unbiased(0.5)) == Unbiased(2.0)
    assert composed(Unbiased(1.0), Unbiased(1.0)) == Unbiased(3.0)
    assert composed(Unbiased(1.0), Biased()) == Biased()


@dataclass(frozen=True)
class TraitsAsSetting(Codec):
    traits: Traits = Traits(error=Biased())  # noqa: RUF009


@dataclass(frozen=True)
class TraitsOfText(Codec):
    traits = "biased"  # type: ignore[assignment]


@dataclass(frozen=True)
class KeepsAKey(Codec):
    keeps = ("momentum",)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (TraitsAsSetting, "`traits` is a declaration, not a setting"),
        (TraitsOfText, r"TraitsOfText\.traits is a Traits"),
        (KeepsAKey, r"KeepsAKey\.keeps is a tuple of Slot"),
    ],
)
def test_a_wrong_declaration_is_refused(scheme: Any, words: str) -> None:
    with pytest.raises(SchemeError, match=words):
        make(scheme())
