"""Wrappers, alone and around each other, on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from commhooks import ErrorFeedback, PerParameter, Rule, Scheme, Simulation, make
from commhooks.core import Biased, Bucket, Codec, Layout, Result, Traits
from commhooks.core._scheme import SchemeExchange, slot_error, slots_of
from commhooks.hook._engine import Engine
from commhooks.research.baselines import AlignedTopK, GlobalQSGD, RandomBlock
from commhooks.schemes import (
    BatchedPowerSGD,
    Blockwise,
    Dense,
    Gossip,
    Hierarchical,
    Noop,
    PowerSGD,
    RandomK,
    TopK,
    TwoPhaseCast,
)
from commhooks.wrappers import (
    EF21,
    Cast,
    Coalesced,
    DelayedStart,
    FlushResidual,
    Schedule,
    TwoPhase,
)
from commhooks.wrappers import _cast as _cast
from commhooks.wrappers._feedback import RESIDUAL, keeps_residual
from ddp_core import AllReduce, simulate
from tests.unit.references import lost

SHAPES = {"weight": (12, 10), "bias": (12,), "head": (12, 10)}
NUMEL = 252
# Entries of these gradients stay below 5 and 12 ranks' partial sums below 8 in float32.
ATOL = 1e-5


@dataclass(frozen=True)
class Half(Codec):
    """Sends half of the gradient, exactly."""

    traits = Traits(error=Biased())

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return {"half": grad / 2}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return payload["half"].clone()


@dataclass(frozen=True)
class Strided(Codec):
    """Sends every fourth entry, as a view."""

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        return {"some": grad[1::4]}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        out = torch.zeros_like(like)
        out[1::4] = payload["some"]
        return out


@pytest.mark.parametrize("numel", [1, 2, 4, 5, 9])
def test_a_payload_may_be_a_view(numel: int) -> None:
    """A view of one entry counts as contiguous, whatever its stride."""
    (mean,) = Simulation(Strided(), {"p": (numel,)}, world_size=1).step([torch.ones(numel)])
    assert mean.tolist() == [float(index % 4 == 1) for index in range(numel)]


def rank_gradients(
    world_size: int, step: int, dtype: torch.dtype = torch.float32, numel: int = NUMEL
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + world_size)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world_size)]


def ranks_of(scheme: Scheme, world_size: int = 2) -> Simulation:
    return Simulation(scheme, SHAPES, world_size=world_size)


def change(ranks: Simulation, scheme: Scheme) -> None:
    for engine in ranks.engines:
        engine.scheme = scheme


def lost_by(
    ranks: Simulation, schemes: Sequence[Scheme], dtype: torch.dtype = torch.float32
) -> float:
    """The largest part of the gradients that is neither applied nor held, over two steps each."""

    def steps() -> Iterator[list[Tensor]]:
        for index, scheme in enumerate(schemes):
            change(ranks, scheme)
            for step in (2 * index, 2 * index + 1):
                yield rank_gradients(len(ranks.engines), step, dtype, ranks.layout.numel)

    return lost(ranks, steps())


# ---- error feedback


def test_the_residual_is_what_was_not_sent() -> None:
    ranks = ranks_of(ErrorFeedback(Half()), 1)
    (grad,) = rank_gradients(1, 0)
    (mean,) = ranks.step([grad])
    assert torch.equal(mean, grad / 2)
    assert torch.equal(ranks.memory(0), grad / 2)


def test_feedback_around_a_scheme_that_returns_its_input_keeps_the_mean() -> None:
    # The corrected gradient is the no-op's mean and becomes the residual: two tensors are needed.
    grads = rank_gradients(2, 0)
    means = ranks_of(ErrorFeedback(Noop())).step(grads)
    assert all(torch.equal(mean, grad) for mean, grad in zip(means, grads, strict=True))


# ---- composition: nothing is lost in any order


FULL = ErrorFeedback(PowerSGD(rank=1))
COMPOSED = {
    "feedback outside a rule": ErrorFeedback(
        PerParameter([Rule(Dense(), max_dim=1)], PowerSGD(rank=1))
    ),
    "feedback inside a rule": PerParameter([Rule(FULL, name="head")], Dense()),
    "two feedbacks side by side": PerParameter([Rule(FULL, name="head")], ErrorFeedback(Half())),
    "delayed feedback": DelayedStart(FULL, 3),
    "feedback before": DelayedStart(Dense(), 3, before=FULL),
    "feedback around delayed": ErrorFeedback(DelayedStart(PowerSGD(rank=1), 3)),
    "coalesced": Coalesced(ErrorFeedback(BatchedPowerSGD())),
    "nested rules": PerParameter(
        [Rule(PerParameter([Rule(FULL, name="head")], Dense()), min_dim=2)], ErrorFeedback(Half())
    ),
}


@pytest.mark.parametrize("which", COMPOSED)
@pytest.mark.parametrize("world_size", [1, 3])
def test_applied_and_held_is_everything(which: str, world_size: int) -> None:
    scheme = COMPOSED[which]
    assert lost_by(ranks_of(scheme, world_size), [scheme] * 3) < ATOL


INT8, INT4 = Blockwise("int8", 256), Blockwise("int4", 128, rotate=True)
# Entries, ranks and a scheme that rounds more than once, or sends what all ranks choose.
ROUNDED = {
    "top-k in two phases": (1000, 4, TopK(0.05, pattern="two_phase")),
    "signs in two phases": (3000, 4, Blockwise("sign", 256)),
    "codes that are summed": (1000, 4, GlobalQSGD()),
    **{f"rows of {n} entries": (n, 3, AlignedTopK(0.3, row=32)) for n in (1, 31, 33, 3199)},
    **{
        f"two levels, {inside}, {between}": (10_001, 6, Hierarchical(inside, between, 2))
        for inside in (TwoPhaseCast(torch.float32), INT8)
        for between in (INT8, INT4)
    },
}


@pytest.mark.parametrize(("numel", "world_size", "scheme"), ROUNDED.values(), ids=ROUNDED)
def test_residuals_hold_what_every_rounding_loses(
    numel: int, world_size: int, scheme: Scheme
) -> None:
    fed = ErrorFeedback(scheme)
    ranks = Simulation(fed, {"p": (numel,)}, world_size=world_size)
    assert lost_by(ranks, [fed] * 3) < 2 * ATOL


CASTS = {
    "cast inside": ErrorFeedback(Cast(PowerSGD(rank=1), torch.float16)),
    "cast outside": Cast(ErrorFeedback(PowerSGD(rank=1)), torch.float16),
    "cast around feedback around rules": Cast(COMPOSED["feedback outside a rule"], torch.float16),
    "cast in a rule": ErrorFeedback(
        PerParameter([Rule(Cast(Dense(), torch.float16), max_dim=1)], PowerSGD(rank=1))
    ),
    "two casts in rules": ErrorFeedback(
        PerParameter(
            [Rule(Cast(Dense(), torch.float16), max_dim=1)], Cast(PowerSGD(rank=1), torch.float16)
        )
    ),
    "two casts": ErrorFeedback(Cast(Cast(Dense(), torch.float16), torch.bfloat16)),
    "cast inside, one matrix": ErrorFeedback(Cast(BatchedPowerSGD(), torch.float16)),
    "cast outside, one matrix": Cast(ErrorFeedback(BatchedPowerSGD()), torch.float16),
    "cast inside, random entries": ErrorFeedback(Cast(RandomK(0.5), torch.bfloat16)),
    "cast inside, a random block": ErrorFeedback(Cast(RandomBlock(0.5), torch.bfloat16)),
    "two casts, residual meanwhile": Cast(
        Cast(ErrorFeedback(PowerSGD(rank=1)), torch.float16), torch.bfloat16
    ),
    "two casts, feedback inside": Cast(Cast(ErrorFeedback(Dense()), torch.float16), torch.bfloat16),
}


@pytest.mark.parametrize("which", CASTS)
def test_feedback_knows_what_a_cast_rounds(which: str) -> None:
    scheme = CASTS[which]
    # On one rank the sum rounds nothing, so what is lost is float32 rounding: a cast whose
    # rounding was not noted would lose 2^-11 or 2^-8 of entries of about 3 a step.
    assert lost_by(ranks_of(scheme, 1), [scheme] * 3) < ATOL


def test_feedback_in_a_rule_knows_of_a_cast_around_all() -> None:
    ranks = ranks_of(Cast(COMPOSED["feedback inside a rule"], torch.float16), 1)
    (grad,) = rank_gradients(1, 0)
    mean = ranks.step([grad])[0]
    head = slice(132, 252)
    assert_close((mean + ranks.memory(0))[head], grad[head], rtol=0, atol=ATOL)


def test_the_residual_of_a_float64_gradient_is_sent() -> None:
    ranks = Simulation(make("topk", ratio=0.25), {"w": (8,)}, world_size=1)
    grad = torch.arange(1.0, 9.0, dtype=torch.float64)
    sent = torch.stack([ranks.step([grad.clone()])[0] for _ in range(30)])
    assert (sent != 0).any(0).all()  # the smallest entries, too: the sum law cannot see it


# ---- switching: a residual that nobody keeps is flushed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flush_adds_the_residual_once(dtype: torch.dtype) -> None:
    ranks = ranks_of(ErrorFeedback(Half()))
    assert lost_by(ranks, [ErrorFeedback(Half()), FlushResidual(Dense())], dtype) < ATOL
    assert not ranks.engines[0].memory.has(RESIDUAL)


def test_flush_of_a_float64_residual_is_exact_after_buckets_changed() -> None:
    ranks = ranks_of(ErrorFeedback(Half()), 1)
    (grad,) = rank_gradients(1, 0, torch.float64)
    ranks.step([grad / 3])
    change(ranks, FlushResidual(Dense()))
    zero = torch.zeros(NUMEL, dtype=torch.float64)
    split = [ranks.layout.pick([0]), ranks.layout.pick([1, 2])]
    assert torch.equal(ranks.step([zero], buckets=split)[0], grad / 3 / 2)


def test_a_flush_before_an_all_gather_leaves_what_is_gathered_as_it_was() -> None:
    engine = Engine(FlushResidual(Blockwise("int8", 64)), rank=0, world_size=1)
    engine.memory.load({RESIDUAL: {"w": torch.full((64,), 3.0)}})
    engine.begin_bucket(0, is_last=True)
    value, layout = torch.ones(64), Layout(["w"], [(64,)])
    run = partial(engine.scheme.all_gather, parts=[(0, 64)])
    (gathered,) = simulate([engine.exchange(value, layout, output=torch.empty(64), run=run)])
    assert_close(gathered, torch.full((64,), 4.0), rtol=0, atol=0.02)
    assert torch.equal(value, torch.ones(64))
    assert not engine.memory.has(RESIDUAL)


def test_a_schedule_begins_with_the_memory_of_the_part_that_runs() -> None:
    scheme = Schedule([(0, Dense()), (2, PowerSGD(rank=1))])
    begun = [scheme.begins_with("w", torch.Size([12, 10]), torch.float32, step) for step in (1, 2)]
    assert begun == [(), PowerSGD(rank=1).keeps]


def test_rules_flush_the_residual_of_parameters_without_feedback() -> None:
    before, after = ErrorFeedback(Half()), COMPOSED["feedback inside a rule"]
    ranks = ranks_of(before)
    assert lost_by(ranks, [before, after]) < ATOL
    assert ranks.engines[0].memory.get(RESIDUAL, "bias") is None
    assert ranks.engines[0].memory.get(RESIDUAL, "head") is not None


def test_keeping_a_residual_is_found_at_any_depth() -> None:
    for scheme in COMPOSED.values():
        assert keeps_residual(scheme)
    assert not keeps_residual(Coalesced(DelayedStart(Cast(PowerSGD(rank=1)), 3)))


# ---- flags


def test_flags_of_a_delayed_start_cover_both_schemes() -> None:
    scheme = DelayedStart(Dense(), 2, before=FULL)
    assert slots_of(scheme)
    assert scheme.traits.rounds == 2
    assert slot_error(scheme, RESIDUAL, torch.zeros(2), torch.Size([2])) is None
    assert slot_error(scheme, "else", torch.zeros(2), torch.Size([2])) == "unknown"


def test_a_delayed_start_declares_what_runs_before() -> None:
    traits = DelayedStart(Dense(), 2, before=Gossip()).traits
    assert (traits.returns, traits.agrees) == ("update", False)
    assert DelayedStart(Dense(), 2, before=TopK()).traits.biased
    assert DelayedStart(Dense(), 2, before=Coalesced(Dense())).traits.coalesce


def test_flags_of_rules_cover_all_schemes() -> None:
    scheme = PerParameter([Rule(PowerSGD(rank=1), name="head"), Rule(Coalesced(Half()))], Dense())
    assert slots_of(scheme)
    assert scheme.traits == Traits(rounds=4, error=Biased(), coalesce=True)


# ---- cast


def test_a_cast_halves_floating_payloads_only() -> None:
    ranks = ranks_of(Cast(Dense(), torch.float16))
    ranks.step(rank_gradients(2, 0))
    assert ranks.requests == [("all_reduce", 2 * NUMEL)]
    codec = ranks_of(Cast(Half(), torch.float16))  # packed bytes stay as they are
    codec.step(rank_gradients(2, 0))
    assert codec.requests == [("all_gather", 4 * NUMEL)]


def test_a_cast_divides_before_it_narrows() -> None:
    # 200000 is beyond float16, a quarter of it is not: cast first, it would arrive as infinity.
    grads = [torch.full((NUMEL,), value) for value in (200000.0, 1000.0, -1000.0, 3000.0)]
    mean = ranks_of(Cast(Dense(), torch.float16), 4).step(grads)[0]
    # 4 roundings of half a spacing, 2^-11 each, of numbers up to 50000.
    assert_close(mean, torch.full_like(mean, 50750.0), rtol=2**-9, atol=0)


def test_overflow_arrives_as_infinity_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cast, "_warned_of_overflow", False)
    ranks = ranks_of(Cast(Dense(), torch.float16), 1)
    big = torch.full((NUMEL,), 70000.0)
    with pytest.warns(RuntimeWarning, match="65504"):
        assert ranks.step([big])[0].isinf().all()
    assert ranks.step([big])[0].isinf().all()  # a second warning would be an error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sent", [torch.float32, torch.float16])
def test_a_failed_collective_is_thrown_into_the_scheme_under_a_cast(
    dtype: torch.dtype, sent: torch.dtype
) -> None:
    @dataclass(frozen=True)
    class Fallback(Scheme):
        def exchange(self, bucket: Bucket) -> SchemeExchange:
            try:
                mean = yield AllReduce(bucket.gradient.to(sent))
            except OSError:
                mean = bucket.gradient
            return Result(mean)

    grad = torch.ones(3)
    exchange = Cast(Fallback(), dtype).exchange(Bucket(grad, Layout(["p"], [(3,)])))
    next(exchange)
    with pytest.raises(StopIteration) as stop:
        exchange.throw(OSError("gone"))
    assert stop.value.value.mean is grad


def test_two_phases_return_what_the_codec_returns() -> None:
    class Update(Half):
        traits = Traits(returns="update")

    assert TwoPhase(Update()).traits.returns == "update"
    assert TwoPhase(Half()).traits.returns == "mean"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ef21_books_what_a_cast_around_it_sent(dtype: torch.dtype) -> None:
    """Or what a rank is given drifts from what it has booked; on one, the sum rounds nothing."""
    ranks = ranks_of(Cast(EF21(PowerSGD(rank=2)), dtype), 1)
    for step in range(30):
        ranks.step(rank_gradients(1, step))
    memory = ranks.engines[0].memory
    for name in SHAPES:
        assert_close(
            memory.get("ef21.own", name), memory.get("ef21.total", name), atol=ATOL, rtol=0
        )


# ---- rules


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (Rule(Dense(), name="*.bias"), False),
        (Rule(Dense(), name="head*"), True),
        (Rule(Dense(), name="HEAD*"), False),
        (Rule(Dense(), min_dim=2, max_dim=2), True),
        (Rule(Dense(), max_dim=1), False),
        (Rule(Dense(), min_numel=13), False),
        (Rule(Dense(), dtype=torch.float32), True),
        (Rule(Dense(), dtype=torch.float16), False),
    ],
)
def test_a_rule_matches_if_all_its_conditions_hold(rule: Rule, matches: bool) -> None:
    assert rule.matches("head.weight", torch.Size([3, 4]), torch.float32) is matches


def test_the_first_rule_that_matches_decides() -> None:
    scheme = PerParameter([Rule(Dense(), max_dim=1), Rule(Half(), name="*")], Noop())
    (grad,) = rank_gradients(1, 0)
    mean = ranks_of(scheme, 1).step([grad])[0]
    weight, bias, head = slice(0, 120), slice(120, 132), slice(132, 252)
    assert torch.equal(mean[bias], grad[bias])
    assert torch.equal(mean[weight], grad[weight] / 2)
    assert torch.equal(mean[head], grad[head] / 2)


def test_equal_all_reduces_of_a_round_share_a_message() -> None:
    scheme = PerParameter(
        [Rule(PowerSGD(rank=1), name="head"), Rule(Dense(), max_dim=1)], PowerSGD(rank=1)
    )
    ranks = ranks_of(scheme)
    ranks.step(rank_gradients(2, 0))
    # First round: two left factors of 12 and 12 biases; second: two right factors of 10.
    assert ranks.requests == [("all_reduce", 4 * 36), ("all_reduce", 4 * 20)]
