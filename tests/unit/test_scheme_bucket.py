"""Buckets of schemes: gradient and residual, traits, and the tensors that schemes keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import ErrorFeedback, PerParameter, Rule, Scheme, Simulation, make
from commhooks.core import Biased, Bucket, Codec, Exact, Layout, Result, Slot, Traits, Unbiased
from commhooks.core._bucket import SchemeExchange
from commhooks.core._scheme import slots_of
from commhooks.core._slot import Number, StepInfo
from commhooks.core._traits import composed, worst
from commhooks.errors import SchemeError
from commhooks.schemes import Blockwise, Dense, PowerSGD, TopK
from commhooks.wrappers import EF21, Cast, Guard, TwoPhase
from commhooks.wrappers import _guard as _guard
from commhooks.wrappers._base import Wrapper
from commhooks.wrappers._traced import Traced
from ddp_core import AllReduce
from tests.unit.references import lost, rank_gradients

LAYOUT = Layout(["p"], [(6,)])


def bucket(**options: Tensor) -> Bucket:
    return Bucket(torch.arange(6.0), LAYOUT, **options)


def kept() -> dict[str, Tensor]:
    return {"residual": torch.full((6,), 0.5), "unsent": torch.empty(6)}


def test_the_gradient_is_the_raw_one_where_nothing_is_kept():
    given = bucket()
    assert given.gradient is given.raw is given.output


def test_the_gradient_has_the_residual_and_lies_where_the_rest_goes():
    given = bucket(**kept())
    assert torch.equal(given.gradient, given.raw + 0.5)
    assert given.gradient.data_ptr() == given.unsent.data_ptr()
    given.gradient.zero_()
    assert not given.gradient.any()  # it is formed once


def test_another_residual_makes_another_gradient():
    given = bucket(**kept())
    assert torch.equal(given.gradient, given.raw + 0.5)
    assert torch.equal(given.replace(residual=None).gradient, given.raw)


def test_another_place_for_the_rest_makes_another_gradient():
    given = bucket(**kept())
    assert torch.equal(given.gradient, given.raw + 0.5)
    other = given.replace(unsent=torch.empty(6))
    assert other.gradient.data_ptr() == other.unsent.data_ptr() != given.gradient.data_ptr()


def test_a_slot_is_read_in_its_dtype_whatever_was_written():
    given, slot = bucket(), Slot("test.kept")
    given.write(slot, torch.ones(6, dtype=torch.float64))
    given.memory.commit(torch.tensor(True))
    assert torch.equal(given.read(slot), torch.ones(6))
    assert given.read(slot).dtype == torch.float32


def test_a_generator_of_step_0_is_not_that_of_this_step():
    def drawn(now: int, step: int | None = None) -> Tensor:
        return torch.rand(4, generator=StepInfo(step=now).generator("w", step=step))

    assert torch.equal(drawn(5, 0), drawn(0))
    assert not torch.equal(drawn(5, 0), drawn(5))


@dataclass(frozen=True)
class _Sums(Scheme):
    def exchange(self, bucket: Bucket) -> SchemeExchange:
        total = yield AllReduce(bucket.gradient.clone(), "sum")
        return Result(total / bucket.world_size)


def test_a_cast_multiplies_a_sum_back():
    ranks = Simulation(Cast(_Sums()), {"p": (6,)}, world_size=2)
    assert torch.equal(ranks.step([torch.ones(6), torch.full((6,), 3.0)])[0], torch.full((6,), 2.0))


def test_a_layout_is_asked_for_when_it_is_read():
    calls = []

    def layout() -> Layout:
        calls.append(1)
        return LAYOUT

    given = Bucket(torch.zeros(6), layout)
    assert not calls
    assert given.layout is given.layout is LAYOUT
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("result", "unsent"),
    [
        (lambda bucket: Result(bucket.output), 0.0),
        (lambda bucket: Result(bucket.output, sent=bucket.gradient * 0.75), 0.25),
        (lambda bucket: Result(bucket.output, unsent=bucket.gradient * 0.5), 0.5),
    ],
)
def test_a_completed_result_says_what_was_not_sent(result, unsent):
    given = bucket(**kept())
    expected = (given.raw + 0.5) * unsent
    assert given.gradient is not None
    assert torch.equal(given.with_unsent(result(given)).unsent, expected)


def test_a_mean_that_lies_in_the_residuals_place_is_moved():
    given = bucket(**kept())
    result = given.with_unsent(Result(given.gradient.mul_(2.0)))
    assert torch.equal(result.mean, 2 * (given.raw + 0.5))
    assert not result.unsent.any()


def test_a_float64_bucket_is_rounded_for_kernels_and_feedback_gets_the_rest():
    raw = torch.tensor([1.0, 1e-9, 3.0, 0.1, 0.2, 0.3], dtype=torch.float64)
    given = Bucket(raw.clone(), LAYOUT, unsent=torch.empty_like(raw), output=torch.empty_like(raw))
    inside = given.in_float32()
    assert inside.raw.dtype == inside.output.dtype == inside.unsent.dtype == torch.float32
    inside.unsent.fill_(0.25)
    inside.output.copy_(inside.raw)
    result = given.result_of(inside)
    assert result.mean.dtype == torch.float64
    assert torch.equal(result.unsent, raw - raw.float() + 0.25)


def test_a_bucket_that_kernels_take_is_handed_on_as_it_is():
    given = bucket(**kept())
    assert given.in_float32() is given


def test_an_unknown_attribute_and_a_residual_without_a_place_are_refused():
    with pytest.raises(TypeError, match="no attribute ouput; there are layout, memory, output"):
        bucket().replace(ouput=torch.zeros(6))
    with pytest.raises(ValueError, match="needs unsent="):
        bucket(residual=torch.zeros(6))
    with pytest.raises(ValueError, match="needs unsent="):
        bucket(**kept()).replace(unsent=None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_dense_exchange_under_feedback_sends_the_gradients_own_dtype(dtype):
    ranks = Simulation(ErrorFeedback(Dense()), {"p": (600,)}, world_size=2)
    steps = [[grad.to(dtype) for grad in rank_gradients(2, step, 600)] for step in range(4)]
    # The sum over ranks is rounded once a step; what a rank rounds it keeps.
    assert lost(ranks, steps) < 4 * 4 * torch.finfo(dtype).eps
    assert {nbytes for _, nbytes in ranks.requests} == {600 * dtype.itemsize}


@dataclass(frozen=True)
class Peeks(Codec):
    """Looks at the whole bucket, too."""

    def encode(self, gradient: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        assert bucket.gradient is not None
        return {"x": gradient.bfloat16()}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return payload["x"].to(like.dtype)


@dataclass(frozen=True)
class Draws(Wrapper):
    """Hands on a bucket with other random bits."""

    scheme: Scheme

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        return (yield from self.scheme.exchange(bucket.fork_random("mine")))


@pytest.mark.parametrize("inside", [TwoPhase(Peeks()), Draws(Peeks()), Draws(Dense())])
def test_nothing_is_lost_by_a_copy_of_the_bucket(inside):
    ranks = Simulation(ErrorFeedback(inside), {"p": (600,)}, world_size=2)
    assert lost(ranks, [rank_gradients(2, step, 600) for step in range(4)]) < 1e-5


@dataclass(frozen=True)
class Overlooks(Scheme):
    """Reads the gradient without what was kept."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        mean = yield AllReduce(bucket.raw.clone())
        return Result(mean)


def test_a_scheme_that_overlooks_the_residual_is_an_error():
    ranks = Simulation(ErrorFeedback(Overlooks()), {"p": (6,)}, world_size=2)
    with pytest.raises(SchemeError, match=r"Read bucket\.gradient, which is the sum"):
        ranks.step([torch.ones(6), torch.ones(6)])


class Passes(TorchDispatchMode):
    """Counts PyTorch's operations on tensors of at least so many entries."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in [*args, result] if isinstance(value, Tensor)]
        views = ("view", "split", "slice", "detach", "empty", "alias")
        if not any(word in func.__name__ for word in views):
            self.count += any(tensor.numel() >= self.numel for tensor in tensors)
        return result


def passes(scheme: Scheme) -> int:
    """Over a whole gradient, in a step of one rank; those in our own kernels are not seen."""
    shape = (64, 96)
    ranks = Simulation(scheme, {"p": shape}, world_size=1)
    gradient = torch.randn(64 * 96, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        ranks.step([gradient.clone()])
    handed = gradient.clone()
    with Passes(gradient.numel()) as counted:
        ranks.step([handed])
    return counted.count


@pytest.mark.parametrize("inside", [PowerSGD(2), Blockwise("int4"), TopK(0.01)])
def test_a_wrapper_between_feedback_and_scheme_adds_no_pass_over_the_gradient(inside, tmp_path):
    alone = passes(ErrorFeedback(inside))
    for around in (Cast(inside), Guard(inside), Traced(inside, tmp_path, steps=1)):
        assert passes(ErrorFeedback(around)) == alone, around


def test_ranks_measure_the_same_entries_under_a_guard(monkeypatch):
    monkeypatch.setattr(_guard, "_SAMPLE", 4)
    guard = Guard(Dense(), every=1, max_error=1e-6)
    ranks = Simulation(guard, {"p": (4096,)}, world_size=2)
    for _ in range(4):
        ranks.step([torch.arange(4096.0), torch.arange(4096.0)])  # warns if entries differ


def test_differences_of_float64_gradients_are_float64():
    raw = torch.tensor([1.0 + 1e-12, 2.0], dtype=torch.float64)
    ranks = Simulation(EF21(Dense()), {"p": (2,)}, world_size=2)
    assert torch.equal(ranks.step([raw.clone(), raw.clone()])[0], raw)


def test_draws_are_shared_or_of_a_rank() -> None:
    def draws(shared: bool) -> list[float]:
        infos = [StepInfo(rank=rank, world_size=2) for rank in range(2)]
        return [float(torch.rand((), generator=i.generator("w", shared=shared))) for i in infos]

    assert len(set(draws(shared=True))) == 1
    assert len(set(draws(shared=False))) == 2


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


@dataclass(frozen=True)
class KeepsWhatItHalves(Scheme):
    """Sends a half, and keeps the whole."""

    traits = Traits(error=Biased())
    keeps = (CALLS,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        bucket.write(CALLS, bucket.gradient)
        sent = bucket.gradient / 2
        mean = yield AllReduce(sent.clone())
        return Result(mean, sent=sent)


def test_a_gradient_may_be_kept_although_feedback_uses_its_memory_again() -> None:
    ranks = Simulation(ErrorFeedback(KeepsWhatItHalves()), {"a": (3,)}, world_size=2)
    for whole in (1.0, 1.5):  # with the residual of the step before
        ranks.step([torch.ones(3)] * 2)
        assert ranks.memory(0, "test.calls").tolist() == [whole] * 3


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
