"""Laws of every registered scheme, by itself and inside every wrapper."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from commhooks import Simulation
from commhooks.core import Bucket, Layout
from commhooks.hook._coalesce import Coalescer
from commhooks.research.conformance import LAWS
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
    WORLD_SIZES,
    Case,
    has_noise,
    joined,
    make,
    memory_of,
    named,
    normal,
    permuted,
    rank_gradients,
    rounding,
    run_split,
    simulation,
)

STEPS = START_STEP + 2
# Of the laws in ``commhooks.research``, those of a moment; test_conformance has all, by name.
OF_EVERY_CASE = [
    next(law for law in LAWS if law.startswith(start))
    for start in (
        *("any size", "all ranks get", "payload sizes", "zeros are averaged", "gradients keep"),
        *("the results do not depend", "an entry that is not finite", "save, load, continue"),
    )
]


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
    for memory, other in zip(memory_of(left), memory_of(right), strict=True):
        assert memory.keys() == other.keys()
        for place, value in memory.items():
            assert torch.equal(value, other[place]), place


# ---- what ``commhooks check`` asks of every scheme


def laws_about(case: Case) -> Iterator[Any]:
    """Yields a parameter for each law that is about the case."""
    scheme, marks = case.scheme, () if case.at_every_run else pytest.mark.slow
    for law in OF_EVERY_CASE:
        if scheme.traits.averages and not LAWS[law].exempts(scheme):
            yield pytest.param(case, law, marks=marks)


@pytest.mark.parametrize(
    ("case", "law"), [law for case in CASES for law in laws_about(case)], ids=str
)
def test_schemes_obey_the_laws_inside_every_wrapper(case: Case, law: str) -> None:
    # Not by ``check_scheme``, which looks at what a schedule runs, and not at the schedule.
    LAWS[law].check(lambda: case.scheme)


# ---- nothing is lost


@with_feedback
def test_applied_and_residual_sum_to_the_gradients_in_any_buckets(case: Case) -> None:
    ranks, applied = simulation(case, 3), torch.zeros(LAYOUT.numel, dtype=torch.float64)
    total, bound = torch.zeros_like(applied), 0.0
    for step in range(6):
        grads = rank_gradients(3, step)
        corrected = [grad + ranks.memory(rank) for rank, grad in enumerate(grads)]
        bound += rounding(case.scheme, corrected)
        applied += run_split(ranks, step, split=step % 3)[0]
        total += mean_of(grads)
    residual = mean_of([ranks.memory(rank) for rank in range(3)])
    assert_close(applied + residual, total, rtol=0, atol=bound)


@over(MEMORYLESS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_mean_of_sent_is_the_mean(case: Case, world_size: int) -> None:
    grads = rank_gradients(world_size, 0)
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


@named(LINEAR)
def test_linear_schemes_compress_the_mean(name: str) -> None:
    """Over n ranks the same comes out as for the mean gradient on one rank."""
    scheme = make(name, error_feedback=False)
    grads = [normal(LAYOUT.numel, 3, rank, dtype=torch.float64) for rank in range(4)]
    shapes = dict(zip(LAYOUT.names, LAYOUT.shapes, strict=True))
    single, four = (Simulation(scheme, shapes, world_size=n, seed=5) for n in (1, 4))
    for _ in range(3):
        alone = single.step([mean_of(grads)])[0]
        together = four.step(grads)[0]
        # The warm start carries rounding to the next step, amplified by at most the ratio of the
        # singular values (about 10 here) a step: a hundred-fold after two.
        assert_close(together, alone, rtol=0, atol=100 * rounding(scheme, grads, torch.float64))


# ---- what is exact


@pytest.mark.parametrize("name", ["none", "allreduce"])
@world_sizes
def test_dense_average_equals_plain_ddp(name: str, world_size: int) -> None:
    grads = rank_gradients(world_size, 0)
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


# ---- sizes, dtypes, aliasing


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
        expected = clean.step(rank_gradients(2, step))
        buffers = rank_gradients(2, step)
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


@every_case
def test_what_no_rank_uses_at_first_begins_as_if_new(case: Case) -> None:
    ranks, new = simulation(case, 2), simulation(case, 2)
    grads = [grad.clone() for grad in rank_gradients(2, 0)]
    for engine in ranks.engines:
        engine.begin_bucket(0)
    pairs = zip(ranks.engines, grads, strict=True)
    simulate([engine.exchange(grad, lambda: LAYOUT) for engine, grad in pairs])
    for engine, other in zip(ranks.engines, new.engines, strict=True):
        engine.end(unused=LAYOUT.names)
        other.step = engine.step
    for step in range(1, STEPS):
        pairs = zip(
            ranks.step(rank_gradients(2, step)), new.step(rank_gradients(2, step)), strict=True
        )
        assert all(torch.equal(mean, expected) for mean, expected in pairs)


@agreeing
@pytest.mark.parametrize("place", [0, -1])  # in the first bucket of two, in the last
def test_a_bad_bucket_keeps_the_memory_of_the_whole_step(case: Case, place: int) -> None:
    ranks, clean = simulation(case, 2), simulation(case, 2)
    for step in range(START_STEP + 1):
        run_split(ranks, step, 1)
        run_split(clean, step, 1)
    bad = [permuted(grad, LAYOUT, SPLITS[1]) for grad in rank_gradients(2, 100)]
    bad[0][place] = math.inf
    ranks.step(bad, buckets=SPLITS[1])
    assert_same_memory(ranks, clean)


@agreeing
def test_a_bad_first_step_leaves_no_trace(case: Case) -> None:
    ranks, clean = simulation(case, 2), simulation(case, 2)
    bad = rank_gradients(2, 100)
    bad[0][5] = math.nan
    ranks.step(bad)
    for engine in clean.engines:
        engine.step += 1
    for step in range(STEPS):
        assert torch.equal(
            ranks.step(rank_gradients(2, step))[1], clean.step(rank_gradients(2, step))[1]
        )
    assert_same_memory(ranks, clean)


# ---- the same again


@pytest.mark.parametrize("name", ["int8", "qsgd", "terngrad", "random_k", "random_block", "eden"])
def test_equal_seeds_draw_alike_and_others_do_not(name: str) -> None:
    torchs = torch.get_rng_state()
    scheme, grads = make(name, error_feedback=False), rank_gradients(2, 0)
    first, again, other = (
        Simulation(scheme, {"p": (LAYOUT.numel,)}, world_size=2, seed=seed).step(grads)[0]
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), torchs)


@every_case
def test_a_coalesced_step_equals_one_bucket(case: Case) -> None:
    buckets = SPLITS[1]
    whole, parts = simulation(case, 2), simulation(case, 2)
    for step in range(STEPS):
        grads = [permuted(grad, LAYOUT, buckets) for grad in rank_gradients(2, step)]
        expected = whole.step(grads, buckets=[joined(buckets)])
        exchanges, buffers = [], []
        for engine, grad in zip(parts.engines, grads, strict=True):
            coalescer = Coalescer()
            pieces = [piece.clone() for piece in grad.split([bucket.numel for bucket in buckets])]
            for index, (piece, layout) in enumerate(zip(pieces, buckets, strict=True)):
                coalescer.hold(index, piece, lambda layout=layout: layout)
            (group,) = coalescer.groups()
            engine.begin_bucket(group.index, is_last=True)
            exchanges.append(group.exchange(engine.exchange))
            buffers.append(pieces)
        simulate(exchanges)
        for pieces, mean in zip(buffers, expected, strict=True):
            assert torch.equal(torch.cat(pieces), mean)
