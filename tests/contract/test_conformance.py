"""The suite that users run: every registered scheme passes it, and it finds planted defects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback, PerParameter, Rule, Scheme
from commhooks.classic._minmax import MinMax, MinMaxPerChannel
from commhooks.core import Biased, Bucket, Codec, Result, SchemeExchange, Slot, Traits, Unbiased
from commhooks.research.baselines import QSGD, TernGrad
from commhooks.research.conformance import LAWS, check_scheme, exemptions_of, laws_of
from commhooks.wrappers import EF21, AveragedFeedback, Cast, Guard, PeriodicDense, Schedule
from commhooks.wrappers import _cast as _cast
from ddp_core import AllReduce
from tests.contract.cases import make, registered

AVERAGING = [name for name in registered() if make(name).traits.averages]
CONVERGENCE = "three nodes that disagree find their common optimum"
LONG = ("residuals stay bounded", CONVERGENCE)  # hundreds or thousands of steps


@pytest.fixture
def _no_overflow_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cast, "_warned_of_overflow", True)


@pytest.mark.usefixtures("_no_overflow_warning")
@pytest.mark.parametrize("name", AVERAGING)
def test_registered_schemes_obey_every_law(name: str) -> None:
    laws = [text for text in laws_of(make(name)) if text not in LONG]
    assert not [v for v in check_scheme(lambda: make(name), laws) if not v.holds]


@pytest.mark.usefixtures("_no_overflow_warning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "int4" else pytest.mark.slow) for name in AVERAGING],
)
def test_long_runs_of_registered_schemes_obey_the_laws(name: str) -> None:
    laws = [text for text in laws_of(make(name)) if text in LONG]
    assert not [v for v in check_scheme(lambda: make(name), laws) if not v.holds]


@pytest.mark.parametrize("scheme", [MinMax(), MinMaxPerChannel(64)], ids=["whole", "blocks"])
def test_quantization_by_smallest_and_largest_obeys_the_laws(scheme: Scheme) -> None:
    laws = [text for text in laws_of(scheme) if text != CONVERGENCE]
    assert not [v for v in check_scheme(lambda: scheme, laws) if not v.holds]


@dataclass(frozen=True)
class Levels(Codec):
    """127 levels of the largest magnitude: right, and the base of what follows."""

    traits = Traits(error=Biased())

    def largest(self, grad: Tensor) -> Tensor:
        return grad.abs().amax().view(1) if grad.numel() else grad.new_zeros(1)

    def round(self, units: Tensor, bucket: Bucket) -> Tensor:
        return units.round()

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        top = self.largest(grad)
        safe = torch.where((top > 0) & top.isfinite(), top, 1.0)
        codes = self.round(grad * (127 / safe), bucket).nan_to_num(0.0).clamp(-127, 127)
        return {"codes": codes.to(torch.int8), "top": top}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return payload["codes"].to(like.dtype) * (payload["top"] / 127).to(like.dtype)


class MaxOfSigned(Levels):
    """The largest entry, not the largest magnitude: what several peers send."""

    def largest(self, grad: Tensor) -> Tensor:
        return grad.amax().view(1) if grad.numel() else grad.new_zeros(1)


class HidesNan(Levels):
    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return super().encode(grad.nan_to_num(0.0, 0.0, 0.0), bucket)


class DividesByZero(Levels):
    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        top = self.largest(grad)
        return {"codes": (grad * (127 / top)).round().nan_to_num(1.0).to(torch.int8), "top": top}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return super().decode(payload, like, bucket) / (payload["top"] / payload["top"])


class GlobalNoise(Levels):
    def round(self, units: Tensor, bucket: Bucket) -> Tensor:
        return (units + torch.rand_like(units)).floor()


class OwnFirst(Levels):
    """Decodes its own payload better than others can."""

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return super().decode(payload, like, bucket) * (1 + 1e-3 * bucket.rank)


@dataclass(frozen=True)
class NoiseInTheDefaultDtype(Levels):
    def round(self, units: Tensor, bucket: Bucket) -> Tensor:
        noise = torch.rand(units.shape, generator=bucket.generator("noise"))
        return (units + noise.to(units.dtype)).floor()


@dataclass(frozen=True)
class Threshold(Codec):
    """As many entries as are large: sizes depend on values."""

    traits = Traits(error=Biased())

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        places = (grad.abs() > 0.5).nonzero().flatten()
        return {"places": places, "values": grad[places]}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return torch.zeros_like(like).index_copy_(0, payload["places"], payload["values"])


class EvenOnly(Levels):
    """Pairs of entries, as if every bucket had an even number."""

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return super().encode(grad.view(-1, 2).flatten(), bucket)


class LosesWhatItKeeps(Levels):
    """Says that everything was sent."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        result = yield from super().exchange(bucket)
        return Result(result.mean)


@dataclass(frozen=True)
class TakesAllAsSent(Scheme):
    """Sends half, and does not ask what a cast has made of it."""

    traits = Traits(error=Biased())

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        sent = bucket.gradient / 2
        mean = yield AllReduce(sent.clone())
        return Result(mean, sent=sent)


@dataclass(frozen=True)
class Forgets(Levels):
    """State outside the memory that a checkpoint keeps."""

    counts: Counter[int] = field(default_factory=Counter)  # by rank: ranks share a scheme here

    def round(self, units: Tensor, bucket: Bucket) -> Tensor:
        self.counts[bucket.rank] += 1
        return units.round() + self.counts[bucket.rank] % 2


class SendsTooLittle(Levels):
    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return super().decode(payload, like, bucket) * 1e-3


class Noisier(Levels):
    """Random levels that are far apart, said to be near."""

    traits = Traits(error=Unbiased(0.01))

    def round(self, units: Tensor, bucket: Bucket) -> Tensor:
        units = units / 127
        draw = torch.rand(units.shape, generator=bucket.generator("noise", shared=False))
        return (units + draw.to(units)).floor() * 127


class SlightlyLarge(QSGD):
    """Right on average, but for a 256th."""

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return super().decode(payload, like, bucket) * (1 + 2**-8)


class SlightlySmall(TernGrad):
    """Large entries are a 128th too small; the noise is fifty times that."""

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return super().encode(torch.where(grad.abs() > 1, grad * (1 - 2**-7), grad), bucket)


@dataclass(frozen=True)
class TwoRounds(Scheme):
    """Declares one."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        yield AllReduce(bucket.gradient.new_zeros(1))
        mean = yield AllReduce(bucket.gradient.clone())
        return Result(mean)


@dataclass(frozen=True)
class SumsRanksFirst(Scheme):
    """Divides after the sum, in the gradient's own dtype."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        total = yield AllReduce(bucket.gradient.clone(), "sum")
        return Result(total / bucket.world_size)


@dataclass(frozen=True)
class SumsSigns(Scheme):
    """Adds signs in a byte, which has room for those of 127 ranks."""

    traits = Traits(rounds=2, error=Biased())

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient = bucket.gradient
        size = gradient.abs().mean().view(1) if gradient.numel() else gradient.new_zeros(1)
        size = yield AllReduce(size, "max")
        signs = gradient.sign().nan_to_num(0.0).to(torch.int8)
        sent = signs * size
        signs = yield AllReduce(signs, "sum")
        return Result(signs * size / bucket.world_size, sent=sent)


class RunsOutOfLevels(SumsSigns):
    """Has room for the sum, and no level left above 127 ranks."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient = bucket.gradient
        largest = gradient.abs().amax().view(1) if gradient.numel() else gradient.new_zeros(1)
        largest = yield AllReduce(largest, "max")
        levels = self.levels(bucket.world_size)
        level = torch.where(largest > 0, largest, 1.0) / levels
        codes = (gradient / level).round().nan_to_num(0.0).clamp(-levels, levels).to(torch.int8)
        sent = codes * level
        codes = yield AllReduce(codes, "sum")
        return Result(codes * level / bucket.world_size, sent=sent)

    def levels(self, world_size: int) -> float:
        return 127 // world_size


class RoundsToNothing(RunsOutOfLevels):
    """Has no level left above 127 ranks, and sends zeros."""

    def levels(self, world_size: int) -> float:
        return 127 // world_size or 0.1


class SumsSignsLater(SumsSigns):
    """Adds up signs after a warm-up."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        run = bucket.all_reduce() if bucket.step < 10 else super().exchange(bucket)
        return (yield from run)


class SumsSignsOfMany(SumsSigns):
    """Adds up signs where an all-gather would send more."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        run = bucket.all_reduce() if bucket.world_size < 9 else super().exchange(bucket)
        return (yield from run)


SCALE = Slot("test.scale")


class TakesTheScaleBefore(SumsSigns):
    """Divides by the largest entry of the step before, which may be smaller."""

    keeps = (SCALE,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient, old = bucket.gradient, bucket.read(SCALE)
        largest = gradient.abs().amax().view(1) if gradient.numel() else gradient.new_zeros(1)
        largest = yield AllReduce(largest.float(), "max")
        bucket.write(SCALE, largest.expand(old.shape))
        scale = torch.where(old > 0, old, torch.where(largest > 0, largest, 1.0))
        levels = 2**14 // bucket.world_size
        codes = (gradient / scale * levels).round().nan_to_num(0.0).to(torch.int16)
        sent = codes * scale / levels
        codes = yield AllReduce(codes, "sum")
        return Result((codes * scale / levels / bucket.world_size).to(gradient.dtype), sent=sent)


class HidesNanLater(HidesNan):
    """Is right in a warm-up."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        run = bucket.all_reduce() if bucket.step < 10 else super().exchange(bucket)
        return (yield from run)


PER_RANK = Slot("test.per_rank", resize="same")


class KeepsOnePerRank(Levels):
    """Keeps each rank's gradient in a slot of which a checkpoint has one copy."""

    keeps = (PER_RANK,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        bucket.write(PER_RANK, bucket.gradient.float())
        return (yield from super().exchange(bucket))


class KeepsOnePerRankLater(KeepsOnePerRank):
    def exchange(self, bucket: Bucket) -> SchemeExchange:
        run = super().exchange if bucket.step >= 10 else super(KeepsOnePerRank, self).exchange
        return (yield from run(bucket))


class WorksInPlace(Levels):
    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return super().encode(grad.clamp_(-1.0, 1.0), bucket)


class WorksInPlaceLater(Levels):
    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return super().encode(grad.mul_(1.0 if bucket.step == 0 else 0.5), bucket)


class WorksInPlaceOfFloat16(Levels):
    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return super().encode(grad.mul_(0.5 if grad.dtype == torch.float16 else 1.0), bucket)


PLANTED: tuple[tuple[type[Scheme], str], ...] = (
    (MaxOfSigned, "signs and sizes"),
    (HidesNan, "not finite"),
    (DividesByZero, "zeros are averaged"),
    (GlobalNoise, "two runs"),
    (NoiseInTheDefaultDtype, "default dtype"),
    (OwnFirst, "equal bits"),
    (Threshold, "do not depend on values"),
    (EvenOnly, "any size"),
    (LosesWhatItKeeps, "sum to the gradients"),
    (TakesAllAsSent, "what a cast around the scheme rounds"),
    (Forgets, "save, load"),
    (SendsTooLittle, "stay bounded"),
    (Noisier, "variance"),
    (SlightlyLarge, "biased or not"),
    (SlightlySmall, "biased or not"),
    (TwoRounds, "rounds (collectives)"),
    (SumsRanksFirst, "overflow 16 bits"),
    (SumsSigns, "sums of integers"),
    (RunsOutOfLevels, "sums of integers"),
    (RoundsToNothing, "sums of integers"),
    (SumsSignsLater, "sums of integers"),
    (SumsSignsOfMany, "sums of integers"),
    (TakesTheScaleBefore, "sums of integers"),
    (HidesNanLater, "not finite"),
    (KeepsOnePerRank, "the same on all ranks"),
    (KeepsOnePerRankLater, "the same on all ranks"),
    (WorksInPlace, "encode leaves"),
    (WorksInPlaceLater, "encode leaves"),
    (WorksInPlaceOfFloat16, "encode leaves"),
)


def test_the_base_of_the_planted_defects_is_right() -> None:
    assert not [v for v in check_scheme(lambda: ErrorFeedback(Levels())) if not v.holds]


@pytest.mark.parametrize(("kind", "words"), PLANTED, ids=[kind.__name__ for kind, _ in PLANTED])
def test_planted_defects_break_their_law(kind: type[Scheme], words: str) -> None:
    def make() -> Scheme:
        return ErrorFeedback(kind()) if kind().traits.biased else kind()

    (law,) = (text for text in LAWS if words in text)
    (verdict,) = check_scheme(make, [law])
    assert verdict.error
    assert not verdict.holds
    assert "dataclass" not in verdict.error  # else the defect itself has not been run


class OfMatrices(Levels):
    """Is for parameters that rules choose."""

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        assert all(len(shape) > 1 for shape in bucket.layout.shapes)
        return super().encode(grad.clone().mul_(1.0), bucket)


class MarksWithNan(Levels):
    """Keeps a number that does not equal itself."""

    keeps = (SCALE,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        bucket.write(SCALE, torch.full((bucket.raw.numel(),), torch.nan))
        return (yield from super().exchange(bucket))


class SumsFewCodes(SumsSigns):
    """Sends some entries: a single one that is not zero may not be among them."""

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        gradient = bucket.gradient
        places = torch.randperm(gradient.numel(), generator=bucket.generator("places"))[:2]
        some = gradient[places]
        largest = some.abs().amax().view(1) if some.numel() else some.new_zeros(1)
        bad = gradient.isfinite().logical_not().any()
        scale = yield AllReduce(torch.where(bad, torch.inf, largest).float(), "max")
        codes = (some / torch.where(scale > 0, scale, 1.0) * 100).round().nan_to_num(0.0)
        codes = yield AllReduce(codes.to(torch.int32), "sum")
        some = codes * (scale / 100) / bucket.world_size
        mean = torch.zeros_like(gradient).index_copy_(0, places, some.to(gradient.dtype))
        return Result(mean + (scale - scale).to(gradient.dtype))


RIGHT: dict[str, Callable[[], Scheme]] = {
    "rules": lambda: PerParameter(
        [Rule(ErrorFeedback(OfMatrices()), min_dim=2)], default=commhooks.make("none")
    ),
    "nan": lambda: ErrorFeedback(MarksWithNan()),
    "few": SumsFewCodes,
    "start_step": lambda: commhooks.make("topk", ratio=0.1, start_step=1000),
    "coalesce": lambda: commhooks.make("topk", ratio=0.1, coalesce=True),
    "periodic": lambda: PeriodicDense(commhooks.make("onebit"), every=3),
    "schedule": lambda: Schedule([(0, commhooks.make("int8")), (9, commhooks.make("onebit"))]),
    "warm-up": lambda: commhooks.make("onebit_adam", freeze_step=1000),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_schemes_obey_the_laws_in_wrappers_and_later(name: str) -> None:
    laws = [text for text in laws_of(RIGHT[name]()) if text not in LONG]
    assert not [verdict for verdict in check_scheme(RIGHT[name], laws) if not verdict.holds]


def test_what_breaks_after_a_warm_up_is_reported_as_that() -> None:
    (law,) = (text for text in LAWS if "not finite" in text)
    (verdict,) = check_scheme(lambda: ErrorFeedback(HidesNanLater()), [law])
    assert verdict.error.startswith("from step 1,000,000 on: inf at 0")


class LearnsInStepTen(Levels):
    """Begins its state in one step, which a hook that switches to it later does not have."""

    keeps = (SCALE,)

    def exchange(self, bucket: Bucket) -> SchemeExchange:
        if bucket.step <= 10:
            bucket.write(SCALE, torch.ones_like(bucket.gradient, dtype=torch.float32))
        elif not bucket.read(SCALE).all():
            raise ArithmeticError("no scale")
        return (yield from super().exchange(bucket))


def test_a_scheme_that_cannot_begin_late_is_reported_with_the_step() -> None:
    verdict = next(check_scheme(lambda: ErrorFeedback(LearnsInStepTen())))
    assert verdict.error.startswith("from step 1,000,000 on: ArithmeticError: no scale (")


def test_a_biased_scheme_without_feedback_does_not_find_the_optimum() -> None:
    (verdict,) = check_scheme(lambda: commhooks.schemes.TopK(0.34), [CONVERGENCE])
    assert "|x| is" in verdict.error


def test_schemes_that_do_not_average_are_refused() -> None:
    with pytest.raises(ValueError, match="average over ranks"):
        next(check_scheme(lambda: commhooks.make("noop")))


def test_signs_that_overflow_are_reported_with_the_number_of_ranks() -> None:
    (law,) = (text for text in LAWS if "sums of integers" in text)
    (verdict,) = check_scheme(lambda: ErrorFeedback(SumsSigns()), [law])
    assert verdict.error.startswith("128 ranks: codes add up to 128, which torch.int8 does not")


class RaisesWithoutEntries(Levels):
    def largest(self, grad: Tensor) -> Tensor:
        return grad.abs().amax().view(1)


def test_an_exception_is_reported_with_its_line_and_the_input() -> None:
    (law,) = (text for text in LAWS if "any size" in text)
    (verdict,) = check_scheme(lambda: ErrorFeedback(RaisesWithoutEntries()), [law])
    assert re.search(
        r" \(test_conformance\.py:\d+ in largest; shapes \(0,\); 3 ranks\)$", verdict.error
    )


@dataclass(frozen=True)
class ReturnsNothing(Scheme):
    traits = Traits(error=Biased())

    def exchange(self, bucket: Bucket) -> SchemeExchange:  # type: ignore[return]
        yield AllReduce(bucket.gradient.clone())


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda scheme: scheme,
        ErrorFeedback,
        lambda scheme: ErrorFeedback(Cast(scheme, torch.bfloat16)),
        EF21,
        AveragedFeedback,
        lambda scheme: Guard(scheme, every=1),
        lambda scheme: PerParameter([Rule(scheme, max_dim=1)], default=scheme),
    ],
)
def test_a_forgotten_result_is_reported_and_no_other_law_is_checked(
    wrapped: Callable[[Scheme], Scheme],
) -> None:
    (verdict,) = check_scheme(lambda: wrapped(ReturnsNothing()))
    words = "SchemeError: ReturnsNothing.exchange returns Result(mean, ...), got NoneType"
    assert verdict.error.startswith(words)
    assert verdict.is_last


def test_laws_that_are_not_for_a_scheme_are_counted_by_reason() -> None:
    scheme = commhooks.make("dgc")
    counts = exemptions_of(scheme)
    assert sum(counts.values()) == len(LAWS) - len(laws_of(scheme))
    assert counts['of an average (returns="update")'] > 5
