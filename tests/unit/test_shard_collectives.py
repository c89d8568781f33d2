"""Reduce-scatter and all-gather of schemes by themselves, on simulated ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from commhooks import ErrorFeedback, Scheme, make
from commhooks.classic._minmax import MinMaxPerChannel
from commhooks.core import Bucket, Layout
from commhooks.core._layout import Span, equal_shards
from commhooks.core._packed import PackedCodec, Piece, Randomness
from commhooks.errors import SchemeError
from commhooks.hook._engine import Engine, ExactParameters
from commhooks.schemes import Blockwise, Dense, TopK, TwoPhaseCast
from commhooks.verify._judge import error_bound_of
from commhooks.wrappers import EF21, Cast, Guard, PerParameter, Rule, TwoPhase
from commhooks.wrappers._feedback import FlushResidual
from ddp_core import simulate
from tests.shelf import BUILT_IN

RANKS = 3
# Allowed error of one rounding, relative to the norm of what is rounded.
CODECS: dict[str, tuple[Scheme, float]] = {
    "none": (Dense(), 1e-6),
    "fp16": (make("fp16"), 1e-3),
    "bf16": (make("bf16"), 8e-3),
    "bf16 in 32 bits": (TwoPhaseCast(torch.bfloat16), 8e-3),
    "int8": (make("int8"), 0.02),
    "int4": (Blockwise("int4", 256, rotate=True), 0.2),
    "fp8": (make("fp8"), 0.06),
    "fp8, MX": (make("fp8", format="mx_e4m3"), 0.08),
    "eden": (make("eden", bits=4), 0.15),
    "two phases of a codec": (TwoPhase(MinMaxPerChannel(128)), 0.02),
}
# Parts of a flat tensor by rank: as kernels cut, anywhere, with an empty one.
CUTS: dict[str, tuple[Span, ...]] = {
    "aligned": equal_shards(RANKS * 1024, RANKS),
    "short last": ((0, 512), (512, 1024), (1024, 1100)),
    "anywhere": ((0, 301), (301, 600), (600, 700)),
    "empty last": ((0, 301), (301, 600), (600, 600)),
}


def numbers(seed: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def bucket(raw: Tensor, rank: int, **more: object) -> Bucket:
    layout = Layout(["w"], [raw.shape])
    return Bucket(raw, layout, rank=rank, world_size=RANKS, step=3, **more)  # type: ignore[arg-type]


def parts_of_mean(scheme: Scheme, grads: list[Tensor], cut: tuple[Span, ...]) -> list[Tensor]:
    exchanges = [
        scheme.exchange(bucket(grad.clone(), rank, shards=cut)) for rank, grad in enumerate(grads)
    ]
    return [result.mean for result in simulate(exchanges)]


def gathered(scheme: Scheme, parts: list[Tensor], cut: tuple[Span, ...]) -> list[Tensor]:
    exchanges = []
    for rank, part in enumerate(parts):
        whole = part.new_empty(cut[-1][1])
        exchanges.append(scheme.all_gather(bucket(part, rank, output=whole), cut))
    return [result.mean for result in simulate(exchanges)]


def engines_of(scheme: Scheme, count: int = RANKS) -> list[Engine]:
    return [Engine(scheme, rank=rank, world_size=count) for rank in range(count)]


def step_of(engines: list[Engine], given: list[Tensor], layout: Layout, **how: Any) -> list[Tensor]:
    """Runs a step of one bucket; returns the result of each rank."""
    exchanges = []
    for engine, raw in zip(engines, given, strict=True):
        engine.begin_bucket(0, is_last=True)
        exchanges.append(engine.exchange(raw.clone(), layout, **how))
    return simulate(exchanges)


def distance(tensor: Tensor, other: Tensor) -> float:
    return float((tensor - other).norm() / other.norm().clamp_min(1e-20))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("scheme", "allowed"), CODECS.values(), ids=CODECS)
def test_each_rank_gets_its_part_of_the_mean_with_one_rounding(scheme, allowed, cut):
    grads = [numbers(rank, cut[-1][1]) for rank in range(RANKS)]
    mean = sum(grads) / RANKS
    # What one rank rounds is the gradient, which is sqrt(3) times as large as the mean of three.
    bound = allowed * 1.5
    for (begin, end), part in zip(cut, parts_of_mean(scheme, grads, cut), strict=True):
        assert part.numel() == end - begin
        if begin < end:
            assert distance(part, mean[begin:end]) < bound


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("scheme", "allowed"), CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_ranks_get_the_same_parts_of_all_with_one_rounding(scheme, allowed, cut, dtype):
    assert scheme.gathers
    parts = [numbers(rank, end - begin).to(dtype) for rank, (begin, end) in enumerate(cut)]
    kept = [part.clone() for part in parts]
    wholes = gathered(scheme, parts, cut)
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    assert all(torch.equal(*pair) for pair in zip(parts, kept, strict=True)), "input changed"
    more = 0.008 if dtype == torch.bfloat16 else 0
    assert distance(wholes[0].double(), torch.cat(parts).double()) < allowed + more


@pytest.mark.parametrize(
    "codec",
    [
        *(make("int8"), make("fp8"), make("fp8", format="mx_e4m3"), make("eden", bits=4)),
        *(TwoPhaseCast(torch.bfloat16, stochastic) for stochastic in (False, True)),
        TwoPhase(MinMaxPerChannel(128)),
    ],
    ids=str,
)
def test_the_two_halves_are_the_whole_exchange_bit_for_bit(codec: PackedCodec):
    grads = [numbers(rank, RANKS * 1024) for rank in range(RANKS)]
    whole = [codec.exchange(bucket(grad.clone(), rank)) for rank, grad in enumerate(grads)]
    expected = simulate(whole)[0].mean
    cut = CUTS["aligned"]
    assert torch.equal(gathered(codec, parts_of_mean(codec, grads, cut), cut)[0], expected)


@pytest.mark.parametrize("n", [1, 9, 65, 257, 4097])
@pytest.mark.parametrize("name", ["signsgd", "bf16", "int8", "eden"])
def test_shards_cover_a_bucket(name, n):
    codec = TwoPhaseCast(torch.bfloat16) if name == "bf16" else make(name)
    spans = codec.cut(Layout(["p"], [(n,)]), RANKS, codec.granularity)
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == n


def test_all_bytes_of_a_payload_of_16_bits_are_written():
    codec, raw = TwoPhaseCast(torch.bfloat16), numbers(0, 13)
    payloads = []
    for before in (0, 255):
        payloads.append(torch.full((codec.payload_bytes(13),), before, dtype=torch.uint8))
        codec.pack(Piece(raw), payloads[-1], Randomness(bucket(raw, 0), "worker"))
    assert torch.equal(*payloads)


def test_parts_too_small_for_a_payload_travel_as_they_are():
    cut = ((0, 2), (2, 4), (4, 5))
    parts = [numbers(rank, end - begin) for rank, (begin, end) in enumerate(cut)]
    assert torch.equal(gathered(make("int8"), parts, cut)[1], torch.cat(parts))


@pytest.mark.parametrize("inside", [Blockwise("int4", 256), Cast(Dense()), TwoPhaseCast()], ids=str)
def test_feedback_loses_nothing_of_an_all_gather(inside):
    """Gathered values of all steps and residuals add up to the inputs."""
    scheme, cut = ErrorFeedback(inside), CUTS["aligned"]
    engines, layout = engines_of(scheme), Layout(["w"], [(1024,)])
    applied = total = torch.zeros(RANKS * 1024)
    for step in range(4):
        given = [numbers(10 * step + rank, layout.numel) for rank in range(RANKS)]
        run = partial(scheme.all_gather, parts=cut)
        results = step_of(engines, given, layout, output=torch.empty(len(total)), run=run)
        applied, total = applied + results[0], total + torch.cat(given)
    held = torch.cat([engine.memory.get("residual", "w") for engine in engines])
    torch.testing.assert_close(applied + held, total, atol=1e-5, rtol=0)
    assert held.any()


# ---- on many ranks, laid out as FSDP2 does: a piece of each parameter for every rank

MANY = {
    "8 ranks": (8, (512, 1024, 256)),
    "8 ranks, cut anywhere": (8, (500, 1001, 7)),
    "64 ranks": (64, (256, 128)),
    "64 ranks, cut anywhere": (64, (301, 13)),
}
WITHOUT_MEMORY = {
    **{name: make(name) for name in ("none", "fp16", "bf16", "int8", "fp8")},
    "bf16 in 32 bits": TwoPhaseCast(torch.bfloat16),
    "eden": make("eden", bits=4),
}
WITH_FEEDBACK = {
    **{name: make(name, block=64) for name in ("int4", "onebit")},
    "fp8, MX": make("fp8", format="mx_e4m3"),
    "topk": make("topk", ratio=0.1),
    "bf16 in 32 bits": ErrorFeedback(TwoPhaseCast(torch.bfloat16)),
    "fp16 in 32 bits": ErrorFeedback(TwoPhaseCast()),
    "eden": ErrorFeedback(make("eden", bits=4)),
    "per parameter": ErrorFeedback(
        PerParameter([Rule(Dense(), name="1")], default=Blockwise("int4", 64))
    ),
}


class Ranks:
    """Engines of many ranks, and one bucket."""

    def __init__(self, scheme: Scheme, count: int, pieces: tuple[int, ...]) -> None:
        self.engines = engines_of(scheme, count)
        names = [f"{place}#{rank}" for rank in range(count) for place in range(len(pieces))]
        self.layout = Layout(names, [(size,) for _ in range(count) for size in pieces])
        self.shards = equal_shards(self.layout.numel, count)

    def gradients(self, step: int) -> list[Tensor]:
        n = self.layout.numel
        return [numbers(100 * step + engine.rank, n) for engine in self.engines]

    def reduce_scatter(self, gradients: list[Tensor]) -> list[Tensor]:
        return step_of(self.engines, gradients, self.layout, shards=self.shards, agree=True)

    def kept(self, rank: int) -> Tensor:
        values = [self.engines[rank].memory.get("residual", name) for name in self.layout.names]
        return torch.cat([value.view(-1) for value in values if value is not None])


def mean_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().mean(0)


@pytest.mark.parametrize(("count", "pieces"), MANY.values(), ids=MANY)
@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_on_many_ranks_each_shard_is_as_near_the_mean_as_its_scheme_declares(name, count, pieces):
    scheme = WITHOUT_MEMORY[name]
    ranks = Ranks(scheme, count, pieces)
    grads = ranks.gradients(0)
    rounding = error_bound_of(scheme, count).rounding
    assert rounding is not None
    for (begin, end), arrived in zip(ranks.shards, ranks.reduce_scatter(grads), strict=True):
        parts = [grad[begin:end] for grad in grads]
        size = max(float(part.norm()) for part in parts)
        # Errors of ranks are independent, so that their mean has a variance of 1 / ranks. A draw
        # of hundreds of entries is near what is expected of it.
        allowed = rounding + 1.2 * (scheme.traits.error.variance / count) ** 0.5
        assert (arrived.double() - mean_of(parts)).norm() < allowed * size


@pytest.mark.parametrize(
    "scheme", [make("int8"), make("fp8"), make("bf16", stochastic=True)], ids=str
)
def test_random_roundings_of_equal_gradients_average_out_over_ranks(scheme):
    def error(count: int) -> float:
        ranks = Ranks(scheme, count, (64 * 384 // count,))
        grads = ranks.gradients(0)[:1] * count
        return distance(torch.cat(ranks.reduce_scatter(grads)), grads[0])

    # 24,576 entries, so that a draw is near what is expected of it.
    assert error(64) < 1.1 * error(1) / 8


@pytest.mark.parametrize(("count", "pieces"), MANY.values(), ids=MANY)
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_on_many_ranks_what_is_sent_and_what_is_kept_are_the_gradients(name, count, pieces):
    ranks = Ranks(WITH_FEEDBACK[name], count, pieces)
    sent = total = torch.zeros(ranks.layout.numel, dtype=torch.float64)
    for step in range(2):
        grads = ranks.gradients(step)
        total = total + mean_of(grads)
        sent = sent + torch.cat(ranks.reduce_scatter(grads)).double()
    kept = mean_of([ranks.kept(rank) for rank in range(count)])
    assert kept.norm() > 0
    # Each step adds up to 64 numbers below 16 in float32, in two places.
    assert_close(sent + kept, total, rtol=0, atol=2 * 2 * 64 * 16 * 2**-24)


def test_guard_measures_the_error_of_shards():
    """The error is of the whole bucket, although each rank knows its shard of the mean alone."""
    cut, plain = CUTS["anywhere"], make("onebit", block=64, error_feedback=False)
    scheme = Guard(plain, every=1, max_error=1e-3)
    engines = engines_of(scheme)
    layout, grads = Layout(["w"], [(700,)]), [numbers(rank, 700) for rank in range(RANKS)]
    with pytest.warns(RuntimeWarning, match="the error of the average is"):
        means = torch.cat(step_of(engines, grads, layout, shards=cut, agree=True))
    error = distance(means, sum(grads) / RANKS)
    for engine in engines:
        kept = engine.memory.get("guard.error", "w")
        assert float(kept) == pytest.approx(error, rel=1e-5)
        assert float(engine.memory.get("guard.dense_until", "w")) == 1001


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_scheme_says_whether_it_gathers(name):
    scheme = make(name)
    exchange = scheme.all_gather(
        bucket(numbers(0, 1024), 0, output=torch.empty(3 * 1024)), CUTS["aligned"]
    )
    if scheme.gathers:
        next(exchange)
        exchange.close()
    else:
        with pytest.raises(SchemeError, match="cannot gather"):
            next(exchange)


def test_what_only_averages_says_so():
    assert not make("powersgd").gathers
    assert not ErrorFeedback(make("random_k", error_feedback=False)).gathers
    assert TopK(0.1).gathers


def test_a_wrapper_that_looks_at_whole_buckets_says_that_it_returns_no_shards():
    scheme = Blockwise("int4", 64)
    assert scheme.traits.shards
    assert ErrorFeedback(scheme).traits.shards
    assert not EF21(scheme).traits.shards


# ---- parts of a bucket

LAYOUT = Layout(["a", "b", "c"], [(280,), (10, 3), (390,)])  # cut within "a" and "c", or at none


@pytest.mark.parametrize("exact", ["a", "b", "c", "ab", "abc", ""])
@pytest.mark.parametrize("how", ["a rule", "what no scheme may round", "feedback around a rule"])
@pytest.mark.parametrize("cut", [None, CUTS["anywhere"]], ids=["whole", "shards"])
def test_some_parameters_are_averaged_exactly_beside_others(exact: str, how: str, cut):
    """ "c" is in no part of the first rank: its mean cannot be cut as schemes cut it."""
    scheme: Scheme = Blockwise("int4", 64)
    if how != "what no scheme may round":
        scheme = PerParameter(
            [Rule(Dense(), name=parameter) for parameter in exact], default=scheme
        )
    if how == "feedback around a rule":
        scheme = ErrorFeedback(scheme)
    engines = engines_of(scheme)
    for engine in engines if how == "what no scheme may round" else ():
        engine.exactly = ExactParameters(exact)
    total = applied = torch.zeros(700)
    for step in range(3):
        grads = [numbers(10 * step + rank, 700) for rank in range(RANKS)]
        means = step_of(engines, grads, LAYOUT, shards=cut, agree=True)
        mean = means[0] if cut is None else torch.cat(means)
        dense = torch.stack(grads).mean(0)
        for name, approximate, other in zip(
            "abc", LAYOUT.views(mean), LAYOUT.views(dense), strict=True
        ):
            assert (distance(approximate, other) < 1e-6) == (name in exact), name
        total, applied = total + dense, applied + mean
    if how == "feedback around a rule":
        kept = [
            torch.cat([e.memory.get("residual", name).view(-1) for name in "abc"]) for e in engines
        ]
        assert_close(applied + torch.stack(kept).mean(0), total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "pending flush"])
@pytest.mark.parametrize("cut", [None, CUTS["anywhere"]], ids=["whole", "shards"])
def test_what_was_kept_of_parameters_that_travel_exactly_is_sent_once(feedback: bool, cut):
    """By a switch, or a state that was saved before they travelled exactly."""
    scheme: Scheme = Blockwise("int4", 64)
    scheme = ErrorFeedback(scheme) if feedback else FlushResidual(scheme)
    engines = engines_of(scheme)
    kept = [numbers(100 + rank, 280) for rank in range(RANKS)]
    for engine, residual in zip(engines, kept, strict=True):
        engine.exactly = ExactParameters("a")
        engine.memory.load({"residual": {"a": residual.clone()}})
    for step in range(3):
        grads = [numbers(10 * step + rank, 700) for rank in range(RANKS)]
        if step == 0:
            grads[1][699] = torch.nan  # of another parameter: the residual waits
        means = step_of(engines, grads, LAYOUT, shards=cut, agree=True)
        mean = (means[0] if cut is None else torch.cat(means))[:280]
        wanted = torch.stack([grad[:280] for grad in grads]).mean(0)
        if step == 0:
            for engine, residual in zip(engines, kept, strict=True):
                assert torch.equal(engine.memory.get("residual", "a"), residual)
            continue
        wanted += torch.stack(kept).mean(0) if step == 1 else 0.0
        assert_close(mean, wanted, rtol=0, atol=1e-5)
        assert all(engine.memory.get("residual", "a") is None for engine in engines)


@pytest.mark.parametrize("name", ["powersgd", "topk", "random_k", "int4"])
@pytest.mark.parametrize("wrong", ["a", "b"])
def test_what_is_not_finite_beside_others_changes_no_memory(name: str, wrong: str):
    """Some schemes know whether their own part is finite, and the other part may not be."""
    engines = engines_of(make(name))
    for engine in engines:
        engine.exactly = ExactParameters("a")
    before: list[Any] = []
    for step in range(2):
        grads = [numbers(10 * step + rank, 700) for rank in range(RANKS)]
        if step == 1:
            before = [[value.clone() for *_, value in engine.memory.items()] for engine in engines]
            LAYOUT.views(grads[1])["ab".index(wrong)].view(-1)[3] = torch.nan
        step_of(engines, grads, LAYOUT)
    for engine, values in zip(engines, before, strict=True):
        after = [value for *_, value in engine.memory.items()]
        assert values
        assert all(map(torch.equal, values, after))
        assert engine.skipped == 1


def test_rules_know_the_pieces_of_a_parameter_by_its_name():
    rule = Rule(Dense(), name="*.bias", role="bias")
    assert rule.matches("layer.bias#3", torch.Size([4]), torch.float32)
    ranks = Ranks(PerParameter([Rule(Dense(), name="1")], default=make("int8")), 8, (500, 40))
    grads = ranks.gradients(0)
    parts = ranks.layout.views(torch.cat(ranks.reduce_scatter(grads)))
    wanted = ranks.layout.views(mean_of(grads).float())
    for name, mean, other in zip(ranks.layout.names, parts, wanted, strict=True):
        assert (distance(mean, other) < 1e-6) == name.startswith("1#")
