"""The laws that every registered scheme obeys, by itself and inside every wrapper."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import commhooks
from commhooks import ErrorFeedback, Scheme, Simulation
from commhooks.classic._minmax import MinMax, MinMaxPerChannel
from commhooks.core import Biased, Bucket, Codec, Layout, Traits
from commhooks.core._scheme import slots_of
from commhooks.hook._coalesce import Coalescer
from commhooks.hook._engine import Engine
from commhooks.schemes import Blockwise
from commhooks.wrappers import _cast as _cast
from ddp_core import simulate
from tests.contract.cases import (
    AGREEING,
    AVERAGING,
    CASES,
    FEEDBACK,
    LAYOUT,
    LINEAR,
    MEMORYLESS,
    SPLITS,
    START_STEP,
    UNBIASED,
    UNLIKE,
    WORLD_SIZES,
    Case,
    gradients,
    has_noise,
    joined,
    make,
    memory_of,
    named,
    normal,
    permuted,
    rounding,
    run_split,
    simulation,
)

STEPS = START_STEP + 2


def over(cases: list[Case]) -> pytest.MarkDecorator:
    """A test of each case, of some in ``make test-all`` only."""
    params = [
        pytest.param(case, marks=() if case.at_every_run else pytest.mark.slow) for case in cases
    ]
    return pytest.mark.parametrize("case", params, ids=str)


every_case, averaging, agreeing = over(CASES), over(AVERAGING), over(AGREEING)
with_feedback = over(FEEDBACK)
world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)


@pytest.fixture(autouse=True)
def _no_overflow_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The once-a-process warning has a test of its own."""
    monkeypatch.setattr(_cast, "_warned_of_overflow", True)


def mean_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).mean(0)


def assert_same_memory(left: Simulation, right: Simulation) -> None:
    for mine, theirs in zip(memory_of(left), memory_of(right), strict=True):
        assert mine.keys() == theirs.keys()
        for place, value in mine.items():
            assert torch.equal(value, theirs[place]), place


# ---- ranks agree, nothing is lost


@agreeing
@world_sizes
def test_all_ranks_get_equal_bits(case: Case, world_size: int) -> None:
    ranks = simulation(case, world_size)
    for step in range(STEPS):
        means = ranks.step(gradients(world_size, step))
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert means[0].isfinite().all()


@with_feedback
@world_sizes
def test_applied_and_residual_sum_to_the_gradients(case: Case, world_size: int) -> None:
    ranks = simulation(case, world_size)
    applied = total = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    bound = 0.0
    for step in range(STEPS):
        grads = gradients(world_size, step)
        held = [ranks.memory(rank) for rank in range(world_size)]
        # What is encoded is gradient and residual together; errors of the steps add up.
        corrected = [grad + before for grad, before in zip(grads, held, strict=True)]
        bound += rounding(case.scheme, corrected)
        applied = applied + ranks.step(grads)[0]
        total = total + mean_of(grads)
    residual = mean_of([ranks.memory(rank) for rank in range(world_size)])
    assert_close(applied + residual, total, rtol=0, atol=bound)


@with_feedback
def test_nothing_is_lost_when_buckets_change(case: Case) -> None:
    ranks, applied = simulation(case, 3), torch.zeros(LAYOUT.numel, dtype=torch.float64)
    total, bound = torch.zeros_like(applied), 0.0
    for step in range(6):
        grads = gradients(3, step)
        corrected = [grad + ranks.memory(rank) for rank, grad in enumerate(grads)]
        bound += rounding(case.scheme, corrected)
        applied += run_split(ranks, step, split=step % 3)[0]
        total += mean_of(grads)
    residual = mean_of([ranks.memory(rank) for rank in range(3)])
    assert_close(applied + residual, total, rtol=0, atol=bound)


@over(MEMORYLESS)
@world_sizes
def test_mean_of_sent_is_the_mean(case: Case, world_size: int) -> None:
    grads = gradients(world_size, 0)
    buckets = [
        Bucket(
            grad.clone(),
            LAYOUT,
            output=torch.zeros_like(grad),
            unsent=torch.zeros_like(grad),
            step=START_STEP,
            rank=rank,
            world_size=world_size,
        )
        for rank, grad in enumerate(grads)
    ]
    scheme = case.scheme
    results = simulate([scheme.exchange(bucket) for bucket in buckets])
    sent = []
    for grad, bucket, result in zip(grads, buckets, results, strict=True):
        assert torch.equal(bucket.raw, grad), "unsent is asked for: the gradient stays as it was"
        unsent = bucket.with_unsent(result).unsent
        assert unsent is not None
        sent.append(grad - unsent)
    expected = results[0].mean.double()
    assert_close(mean_of(sent), expected, rtol=0, atol=rounding(scheme, grads))


# ---- flags


@every_case
def test_rounds_is_the_most_collectives_of_a_bucket(case: Case) -> None:
    ranks, most = simulation(case, 4), 0
    for step in range(STEPS):
        ranks.step(gradients(4, step))
        most = max(most, len(ranks.requests))
        ranks.requests.clear()
    if case.variant == "per_parameter":  # may share messages
        assert most <= case.scheme.traits.rounds
    else:
        assert most == case.scheme.traits.rounds


@every_case
def test_stateful_schemes_and_no_others_remember(case: Case) -> None:
    ranks = simulation(case, 2)
    for step in range(STEPS):
        ranks.step(gradients(2, step))
    assert [bool(memory) for memory in memory_of(ranks)] == [bool(slots_of(case.scheme))] * 2


@named(UNBIASED)
def test_schemes_that_are_not_biased_average_out(name: str) -> None:
    """A deterministic one is exact up to rounding, a random one within four standard errors."""
    scheme = make(name, error_feedback=False)
    draws, grads = 64, gradients(2, 0)
    ranks = Simulation(scheme, {"p": (LAYOUT.numel,)}, world_size=2)
    means = torch.stack([ranks.step(grads)[0].double() for _ in range(draws)])
    error = (means.mean(0) - mean_of(grads)).norm()
    spread = means.std(0).norm() / math.sqrt(draws)
    # Rounding is per entry, so its norm grows with sqrt(numel); casts round an entry of at most 5,
    # not the norm, so the bound is far from tight for them.
    assert error <= 4 * spread + rounding(scheme, grads) * math.sqrt(LAYOUT.numel)


@named(LINEAR)
def test_linear_schemes_compress_the_mean(name: str) -> None:
    """Over n ranks the same comes out as for the mean gradient on one rank."""
    scheme = make(name, error_feedback=False)
    grads = [normal(LAYOUT.numel, 3, rank, dtype=torch.float64) for rank in range(4)]
    shapes = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))
    one, four = (Simulation(scheme, shapes, world_size=n, seed=5) for n in (1, 4))
    for _ in range(3):
        alone = one.step([mean_of(grads)])[0]
        together = four.step(grads)[0]
        # The warm start carries rounding to the next step, amplified by at most the ratio of the
        # singular values (about 10 here) a step: a hundred-fold after two.
        assert_close(together, alone, rtol=0, atol=100 * rounding(scheme, grads, torch.float64))


# ---- what is exact


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_zero_arrives_as_zero(case: Case, dtype: torch.dtype) -> None:
    if case.name == "signsgd":
        pytest.skip("a sign is never zero: its page says so")
    ranks = simulation(case, 3)
    for _ in range(STEPS):
        means = ranks.step([torch.zeros(LAYOUT.numel, dtype=dtype)] * 3)
        assert all(torch.equal(mean, torch.zeros_like(mean)) for mean in means)


@pytest.mark.parametrize("name", ["none", "allreduce"])
@world_sizes
def test_dense_average_equals_plain_ddp(name: str, world_size: int) -> None:
    grads = gradients(world_size, 0)
    # DDP multiplies by 1/n, then sums.
    expected = grads[0] * (1.0 / world_size)
    for grad in grads[1:]:
        expected = expected + grad * (1.0 / world_size)
    ranks = Simulation(name, {"p": (LAYOUT.numel,)}, world_size=world_size)
    assert torch.equal(ranks.step(grads)[0], expected)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_casts_recover_what_the_type_holds(name: str) -> None:
    # Whole numbers up to 64, over 4 ranks: every quotient and partial sum has 8 bits.
    grads = [normal(100, rank).mul(8).round().clamp(-16, 16).mul(4) for rank in range(4)]
    mean = Simulation(name, {"p": (100,)}, world_size=4).step(grads)[0]
    assert torch.equal(mean.double(), mean_of(grads))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_recovers_gradients_of_its_rank(rank: int) -> None:
    # All ranks' column spaces agree, so the mean has the rank too.
    left = normal(30 * rank, 1, dtype=torch.float64).view(30, rank)
    rights = [normal(rank * 40, 2, i, dtype=torch.float64).view(rank, 40) for i in range(3)]
    grads = [(left @ right).flatten() for right in rights]
    ranks = Simulation("powersgd", {"w": (30, 40)}, world_size=3, rank=rank)
    # Rounding, times the condition of the factor (below 100 for these draws).
    bound = 100 * rounding(commhooks.schemes.PowerSGD(rank), grads, torch.float64)
    assert_close(ranks.step(grads)[0], mean_of(grads), rtol=0, atol=bound)


def test_batched_powersgd_recovers_a_square_of_its_rank() -> None:
    left, right = normal(30, 1, dtype=torch.float64), normal(30, 2, dtype=torch.float64)
    grad = torch.outer(left, right).flatten()
    ranks = Simulation("batched_powersgd", {"a": (450,), "b": (450,)}, world_size=2)
    bound = 100 * rounding(commhooks.schemes.BatchedPowerSGD(1), [grad], torch.float64)
    assert_close(ranks.step([grad, grad])[0], grad, rtol=0, atol=bound)


@pytest.mark.parametrize("scheme", [MinMax(), MinMaxPerChannel()])
def test_quantization_recovers_its_levels(scheme: Scheme) -> None:
    levels = torch.arange(-127.0, 129.0)
    grads = [levels, levels.flip(0)]
    mean = Simulation(scheme, {"p": (256,)}, world_size=2).step(grads)[0]
    # The distance of levels is 1 up to a spacing of float32, times at most 128 levels.
    assert_close(mean, torch.full_like(mean, 0.5), rtol=0, atol=256 * 1.2e-7)


# ---- sizes, dtypes, aliasing


@agreeing
@pytest.mark.parametrize("numel", [0, 1, 2, 31, 33, 257])
def test_any_size_and_shape_travels(case: Case, numel: int) -> None:
    for shape in [(numel,), (numel, 1), (1, numel, 1, 2)]:
        layout = Layout(["p"], [shape])
        ranks = simulation(case, 3, layout)
        for step in range(STEPS):
            grads = gradients(3, step, layout)
            before = [grad.clone() for grad in grads]
            means = ranks.step(grads)
            assert all(torch.equal(mean, means[0]) for mean in means)
            assert means[0].shape == (layout.numel,)
            assert means[0].isfinite().all()
            assert all(torch.equal(grad, kept) for grad, kept in zip(grads, before, strict=True))


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_keep_their_dtype(case: Case, dtype: torch.dtype) -> None:
    engines = simulation(case, 3).engines
    for step in range(STEPS):
        buffers = [grad.to(dtype) for grad in gradients(3, step)]
        for engine in engines:
            engine.begin_bucket(0, is_last=True)
        pairs = zip(engines, buffers, strict=True)
        means = simulate([engine.exchange(grad, lambda: LAYOUT) for engine, grad in pairs])
        assert [mean.dtype for mean in means] == [dtype] * 3
        assert all(mean.isfinite().all() for mean in means)
        if make(case.name).traits.averages and make(case.name).traits.agrees:
            assert all(torch.equal(mean, means[0]) for mean in means)


@averaging
def test_large_float16_gradients_do_not_overflow(case: Case) -> None:
    ranks = simulation(case, 4, Layout(["p"], [(6, 6)]))
    # The sum over four ranks, 80000, is beyond float16; a factor of the matrix, 20000 sqrt(6), not.
    for mean in ranks.step([torch.full((36,), 20000.0, dtype=torch.float16)] * 4):
        assert (mean.abs() <= 50000.0).all()
        if has_noise(case.scheme):
            continue
        # Casts, levels and the way back to float16 or bfloat16 round to 8 bits or more. Sparse
        # schemes send some of the entries.
        sent = mean[mean != 0]
        assert len(sent)
        assert_close(sent, torch.full_like(sent, 20000.0), rtol=2**-7, atol=0)


@every_case
def test_gradients_and_means_may_be_overwritten_after_the_step(case: Case) -> None:
    """DDP uses the bucket's buffer again, and the optimizer may scale the mean in place."""
    clean, reused = simulation(case, 2), simulation(case, 2)
    for step in range(STEPS):
        expected = clean.step(gradients(2, step))
        buffers = gradients(2, step)
        for engine in reused.engines:
            engine.begin_bucket(0, is_last=True)
        pairs = zip(reused.engines, buffers, strict=True)
        means = simulate([engine.exchange(grad, lambda: LAYOUT) for engine, grad in pairs])
        for mean, right, buffer in zip(means, expected, buffers, strict=True):
            assert torch.equal(mean, right)
            mean.fill_(torch.nan)
            buffer.fill_(torch.nan)
    assert_same_memory(clean, reused)


# ---- steps that are not finite


BAD = {
    "first": (0, math.inf),
    "matrix": (LAYOUT.offsets[1] + 77, math.nan),
    "vector": (LAYOUT.offsets[2] + 3, -math.inf),
    "scalar": (LAYOUT.offsets[6], math.nan),
    "last": (LAYOUT.numel - 1, math.inf),
}


@agreeing
@pytest.mark.parametrize("where", BAD)
def test_a_bad_step_arrives_everywhere_and_changes_no_memory(case: Case, where: str) -> None:
    ranks, clean = simulation(case, 3), simulation(case, 3)
    for step in range(START_STEP + 1):
        ranks.step(gradients(3, step))
        clean.step(gradients(3, step))
    before = memory_of(ranks)
    bad = gradients(3, 100)
    position, value = BAD[where]
    bad[1][position] = value
    for mean in ranks.step(bad):
        assert not mean[position].isfinite()
    for kept, now in zip(before, memory_of(ranks), strict=True):
        assert kept.keys() == now.keys()
        assert all(torch.equal(value, now[place]) for place, value in kept.items())
    for engine in clean.engines:
        engine.step += 1  # a bad step counts; draws are keyed by the count
    for step in (8, 9):
        for mean, expected in zip(
            ranks.step(gradients(3, step)), clean.step(gradients(3, step)), strict=True
        ):
            assert torch.equal(mean, expected)


@every_case
def test_what_no_rank_uses_at_first_begins_as_if_new(case: Case) -> None:
    ranks, new = simulation(case, 2), simulation(case, 2)
    grads = [grad.clone() for grad in gradients(2, 0)]
    for engine in ranks.engines:
        engine.begin_bucket(0)
    pairs = zip(ranks.engines, grads, strict=True)
    simulate([engine.exchange(grad, lambda: LAYOUT) for engine, grad in pairs])
    for engine, other in zip(ranks.engines, new.engines, strict=True):
        engine.end(unused=LAYOUT.names)
        other.step = engine.step
    for step in range(1, STEPS):
        pairs = zip(ranks.step(gradients(2, step)), new.step(gradients(2, step)), strict=True)
        assert all(torch.equal(mean, expected) for mean, expected in pairs)


@agreeing
@pytest.mark.parametrize("place", [0, -1])  # in the first bucket of two, in the last
def test_a_bad_bucket_keeps_the_memory_of_the_whole_step(case: Case, place: int) -> None:
    ranks, clean = simulation(case, 2), simulation(case, 2)
    for step in range(START_STEP + 1):
        run_split(ranks, step, 1)
        run_split(clean, step, 1)
    bad = [permuted(grad, LAYOUT, SPLITS[1]) for grad in gradients(2, 100)]
    bad[0][place] = math.inf
    ranks.step(bad, buckets=SPLITS[1])
    assert_same_memory(ranks, clean)


@agreeing
def test_a_bad_first_step_leaves_no_trace(case: Case) -> None:
    ranks, clean = simulation(case, 2), simulation(case, 2)
    bad = gradients(2, 100)
    bad[0][5] = math.nan
    ranks.step(bad)
    for engine in clean.engines:
        engine.step += 1
    for step in range(STEPS):
        assert torch.equal(ranks.step(gradients(2, step))[1], clean.step(gradients(2, step))[1])
    assert_same_memory(ranks, clean)


# ---- the same again


@every_case
def test_runs_are_deterministic(case: Case) -> None:
    first, second = simulation(case, 3), simulation(case, 3)
    for step in range(STEPS):
        pairs = zip(run_split(first, step), run_split(second, step), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)
    assert_same_memory(first, second)


# As it was; into other buckets, apart, together, or anew.
CHANGES = ((1, 2), (0, 0), (0, 1), (2, 0))


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        pytest.param(case, *change, marks=() if is_there else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for change in CHANGES
        for is_there in [case.at_every_run and change in (CHANGES[0], CHANGES[1 + number % 3])]
    ],
    ids=str,
)
def test_saving_loading_and_continuing_equals_not_stopping(
    case: Case, before: int, after: int
) -> None:
    ranks = simulation(case, 3)
    for step in range(STEPS):
        run_split(ranks, step, before)
    resumed = simulation(case, 3)
    for old, new in zip(ranks.engines, resumed.engines, strict=True):
        saved: dict[str, dict[str, Tensor]] = {}
        for key, name, value in old.memory.items():
            saved.setdefault(key, {})[name] = value.clone()
        new.memory.load(saved)
        new.step = old.step
    for step in range(STEPS, STEPS + 3):
        pairs = zip(run_split(ranks, step, after), run_split(resumed, step, after), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)
    assert_same_memory(ranks, resumed)


@every_case
def test_a_coalesced_step_equals_one_bucket(case: Case) -> None:
    buckets = SPLITS[1]
    whole, parts = simulation(case, 2), simulation(case, 2)
    for step in range(STEPS):
        grads = [permuted(grad, LAYOUT, buckets) for grad in gradients(2, step)]
        expected = whole.step(grads, buckets=[joined(buckets)])
        exchanges, buffers = [], []
        for engine, grad in zip(parts.engines, grads, strict=True):
            coalescer = Coalescer()
            pieces = [piece.clone() for piece in grad.split([one.numel for one in buckets])]
            for index, (piece, layout) in enumerate(zip(pieces, buckets, strict=True)):
                coalescer.hold(index, piece, lambda layout=layout: layout)
            (group,) = coalescer.groups()
            engine.begin_bucket(group.index, is_last=True)
            exchanges.append(group.exchange(engine.exchange))
            buffers.append(pieces)
        simulate(exchanges)
        for pieces, mean in zip(buffers, expected, strict=True):
            assert torch.equal(torch.cat(pieces), mean)


# ---- feedback is needed, and enough


@dataclass(frozen=True)
class TopOne(Codec):
    """Keeps the largest entry; not registered, the theorem below is about it."""

    traits = Traits(error=Biased())

    def encode(self, grad: Tensor, bucket: Bucket) -> dict[str, Tensor]:
        index = grad.abs().argmax().view(1)
        return {"value": grad[index], "index": index}

    def decode(self, payload: dict[str, Tensor], like: Tensor, bucket: Bucket) -> Tensor:
        return torch.zeros_like(like).index_copy_(0, payload["index"], payload["value"])


def descend(scheme: Scheme, steps: int, rate: float) -> Tensor:
    """Three nodes with f_i = <a_i, x>^2 + |x|^2 / 4, a = (-3, 2, 2) rotated, from x = 1."""
    nodes = torch.tensor([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)
    ranks = Simulation(scheme, {"x": (3,)}, world_size=3)
    x = torch.ones(3, dtype=torch.float64)
    for _ in range(steps):
        x = x - rate * ranks.step([2 * (a @ x) * a + x / 2 for a in nodes])[0]
    return x


def test_top_one_without_feedback_grows_by_the_factor_of_theory() -> None:
    # At x = c (1, 1, 1): <a, x> = c, the gradient 2 c a + c / 2 has its largest entry, -5.5 c,
    # where a is -3. The mean is -5.5 c / 3 everywhere: x grows by 1 + 11 eta / 6.
    x = descend(TopOne(), 50, 0.01)
    growth = (1 + 11 * 0.01 / 6) ** 50
    assert_close(x, torch.full_like(x, growth), rtol=1e-12, atol=0)


def test_top_one_with_feedback_converges_there() -> None:
    assert descend(ErrorFeedback(TopOne()), 1000, 0.01).norm() < 1e-4


@named(UNLIKE)
def test_biased_schemes_reach_the_optimum_of_unlike_shards_only_with_feedback(name: str) -> None:
    """f_i = |x - t_i|^2 / 2: gradients do not vanish at the optimum, nor does what is dropped."""
    bare = make(name, error_feedback=False)
    n = 192 if isinstance(bare, Blockwise) else 64  # fewer would travel in 16 bits
    targets = [normal(n, 9, rank, dtype=torch.float64) for rank in range(3)]
    distances = []
    for scheme in (bare, ErrorFeedback(bare)):
        ranks = Simulation(scheme, {"x": (n,)}, world_size=3)
        x = torch.zeros(n, dtype=torch.float64)
        for _ in range(800):
            x = x - 0.01 * ranks.step([x - target for target in targets])[0]
        distances.append(float((x - mean_of(targets)).norm()))
    # With feedback x stays within rate * residual of the uncompressed path (EF identity); without,
    # it stops as soon as the rounded gradients cancel, about a level away; a rotation that is drawn
    # anew each step averages part of that out.
    assert distances[1] < 0.2 * distances[0]


# ---- engines as such


def test_an_abandoned_step_that_finishes_late_does_not_end_the_next_one() -> None:
    engine = Engine(ErrorFeedback(TopOne()), rank=0, world_size=1)
    layouts = [Layout([name], [(4,)]) for name in "ab"]

    def start(index: int, *, is_last: bool) -> object:
        engine.begin_bucket(index, is_last=is_last)
        exchange = engine.exchange(normal(4, index), lambda: layouts[index])
        return exchange, next(exchange)

    late, request = start(0, is_last=False)  # backward raises here
    first, first_request = start(0, is_last=False)
    with pytest.raises(StopIteration):
        late.send(request.combine([request])[0])
    last, last_request = start(1, is_last=True)
    with pytest.raises(StopIteration):
        last.send(last_request.combine([last_request])[0])
    assert engine.step == 0, "bucket 0 is still under way"
    with pytest.raises(StopIteration):
        first.send(first_request.combine([first_request])[0])
    assert (engine.step, engine.under_way) == (1, False)
    assert engine.memory.get("residual", "a") is not None


@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_a_bad_uncompressed_bucket_counts_too(kind: str) -> None:
    engine = Engine(ErrorFeedback(TopOne()), rank=0, world_size=1)
    bad = torch.full((3,), math.inf)
    other = torch.complex(bad, bad) if kind == "complex" else bad.to_sparse()
    for index in range(2):
        engine.begin_bucket(index, is_last=index == 1)
    simulate([engine.exchange(normal(4, 1), lambda: Layout(["a"], [(4,)]))])
    simulate([engine.exchange(other, lambda: Layout(["b"], [(3,)]))])
    assert engine.skipped == 1
    assert not engine.memory.get("residual", "a").any()
